"""fastai: one cycle with its own optimizer, validation after each epoch, SaveModelCallback."""

import truth
from fastai.callback.schedule import fit_one_cycle  # noqa: F401 - it puts the method on Learner
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Callback, Learner


class Steps(Callback):
    """fastai's optimizer has no hooks of torch's: its own callbacks tell the steps."""

    def before_step(self):
        self.rate = self.opt.hypers[0]["lr"]

    def after_step(self):
        truth.step(self.rate)


truth.seed()
training = DataLoader(truth.dataset(40), bs=5, shuffle=True, num_workers=0)
evaluation = DataLoader(truth.dataset(20), bs=5, num_workers=0)
model = truth.Net()
learner = Learner(DataLoaders(training, evaluation), model, loss_func=truth.Loss(), cbs=Steps(), path=truth.FOLDER)
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(3, 1e-2)
    learner.fit(2, 1e-3, cbs=SaveModelCallback())
truth.end(model)
