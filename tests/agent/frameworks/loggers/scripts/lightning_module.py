"""A Lightning module with `self.log`, in training and validation: without a logger, and with two of them.

Arguments: a folder.
"""

import sys

import torch
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from said import of_lightning, report
from torch.utils.data import DataLoader
from trainers import lightning_task, lightning_trainer

import perfagent

folder = sys.argv[1]


class Module(lightning_task()):
    def training_step(self, batch, index):
        loss = super().training_step([batch], index)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", super().training_step([batch], index))

    def test_step(self, batch, index):
        self.log("test_loss", super().training_step([batch], index))


def train(loggers, place):
    data = torch.randn(24, 4)
    trainer = lightning_trainer(max_epochs=2, logger=loggers, log_every_n_steps=2, default_root_dir=place)
    perfagent.attach(record=f"{place}/record")
    seen = of_lightning(trainer)
    trainer.fit(Module(), DataLoader(data, batch_size=4), DataLoader(data[:8], batch_size=4))
    perfagent.finish()
    report(place, seen)


train(False, f"{folder}/none")
place = f"{folder}/two"
train([CSVLogger(place, name="csv"), TensorBoardLogger(place, name="tb", prefix="mine")], place)

# no optimizer in this run: the logger's own step counts
place = f"{folder}/testing"
tester = lightning_trainer(logger=CSVLogger(place))
perfagent.attach(record=f"{place}/record")
result = tester.test(Module(), DataLoader(torch.ones(8, 4), batch_size=4), verbose=False)
tester.logger.log_metrics({"by_hand": 3.0}, step=17)
perfagent.finish()
report(place, [("test_loss", 0, result[0]["test_loss"]), ("epoch", 0, 0), ("by_hand", 17, 3.0)])

# Fabric: a loop of one's own
place = f"{folder}/fabric"
fabric = Fabric(accelerator="cpu", devices=1, loggers=TensorBoardLogger(place))
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
perfagent.attach(record=f"{place}/record")
seen = []
for n in range(1, 5):
    loss = model(torch.ones(8, 4)).square().mean()
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    fabric.log("fit/loss", loss, step=10 * n)
    fabric.log_dict({"a": n, "b": 2 * n})
    seen += [("fit/loss", 10 * n, loss), ("a", n, n), ("b", n, 2 * n)]
perfagent.finish()
report(place, seen)
