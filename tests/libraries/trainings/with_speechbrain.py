"""SpeechBrain: Brain with accumulation and clipping, validation after each epoch, evaluate()."""

import speechbrain
import torch
import truth


class Classifier(speechbrain.Brain):
    criterion = truth.Loss()

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return self.criterion(predictions, batch[1])


truth.seed()
training, evaluation = truth.loaders()
model = truth.Net()
brain = Classifier(
    {"model": model},
    lambda parameters: truth.follow(torch.optim.Adam(parameters, lr=0.01)),
    run_opts={"device": "cpu", "grad_accumulation_factor": 2, "max_grad_norm": 5.0},
)
brain.fit(range(3), training, evaluation, progressbar=False)
brain.evaluate(evaluation, progressbar=False)
truth.end(model)
