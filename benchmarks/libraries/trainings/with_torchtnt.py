"""torchtnt: AutoUnit with accumulation, a schedule by step, evaluation after each epoch and within them."""

import torch
import truth
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.fit import fit


class Unit(AutoUnit):
    criterion = truth.Loss()

    def compute_loss(self, state, data):
        x, y = data
        given = self.module(x)
        return self.criterion(given, y), given

    def configure_optimizers_and_lr_scheduler(self, module):
        optimizer = truth.follow(torch.optim.AdamW(module.parameters(), lr=0.01))
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


truth.seed()
training, evaluation = truth.loaders()
model = truth.Net()
unit = Unit(
    module=model, device=torch.device("cpu"), gradient_accumulation_steps=2, step_lr_interval="step", clip_grad_norm=1.0
)
fit(unit, train_dataloader=training, eval_dataloader=evaluation, max_epochs=3, evaluate_every_n_epochs=1)
unit = Unit(module=model, device=torch.device("cpu"))
fit(unit, train_dataloader=training, eval_dataloader=evaluation, max_epochs=2, evaluate_every_n_steps=4)
truth.end(model)
