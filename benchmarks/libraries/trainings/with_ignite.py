"""Ignite: trainer, evaluator after each epoch, warm-up, checkpoints."""

import torch
import truth
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint, TerminateOnNan, create_lr_scheduler_with_warmup
from ignite.metrics import Accuracy

truth.seed()
model = truth.Net()
optimizer = truth.follow(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
training, evaluation = truth.loaders()
trainer = create_supervised_trainer(model, optimizer, truth.Loss())
evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
decay = torch.optim.lr_scheduler.StepLR(optimizer, 5)
warm_up = create_lr_scheduler_with_warmup(decay, warmup_start_value=0.01, warmup_duration=4, warmup_end_value=0.05)
trainer.add_event_handler(Events.ITERATION_STARTED, warm_up)
trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(evaluation))
trainer.add_event_handler(
    Events.EPOCH_COMPLETED, ModelCheckpoint(truth.FOLDER, "net", require_empty=False), {"model": model}
)
trainer.run(training, max_epochs=3)
truth.end(model)
