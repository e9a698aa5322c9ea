"""MMEngine: Runner with accumulation in its OptimWrapper, a schedule by epoch, validation after each epoch."""

import torch
import truth
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner


class Classifier(BaseModel):
    def __init__(self):
        super().__init__()
        self.net, self.criterion = truth.Net(), truth.Loss()

    def forward(self, x, y, mode):
        given = self.net(x)
        return {"loss": self.criterion(given, y)} if mode == "loss" else (given.argmax(1), y)


class Accuracy(BaseMetric):
    def process(self, batch, samples):
        self.results.append(float((samples[0] == samples[1]).float().mean()))

    def compute_metrics(self, results):
        return {"accuracy": sum(results) / len(results)}


truth.seed()
training, evaluation = truth.loaders()
model = Classifier()
optimizer = truth.follow(torch.optim.SGD(model.parameters(), lr=0.05))
Runner(
    model,
    truth.FOLDER,
    train_dataloader=training,
    val_dataloader=evaluation,
    val_evaluator={"type": Accuracy},
    train_cfg={"by_epoch": True, "max_epochs": 3, "val_interval": 1},
    val_cfg={},
    optim_wrapper={"type": "OptimWrapper", "optimizer": optimizer, "accumulative_counts": 2},
    param_scheduler={"type": "MultiStepLR", "milestones": [1, 2], "by_epoch": True},
    randomness={"seed": 0},
).train()
truth.end(model)
