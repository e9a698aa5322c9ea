"""The Transformers Trainer with evaluations, three times: alone, with TensorBoard and a callback that logs, and not
captured.

Arguments: a folder.
"""

import sys

from said import of_transformers, report

import perfagent

folder = sys.argv[1]
perfagent.attach(record=f"{folder}/alone/record")  # before the import

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from trainers import gpt2_trainer  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.integrations import TensorBoardCallback  # noqa: E402


class Own(TrainerCallback):
    """Logs something of its own while the Trainer logs."""

    def __init__(self, writer, logged):
        self.writer, self.logged = writer, logged

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.writer.add_scalar("own/loss", 2.5, state.global_step)
        self.logged.append(("own/loss", state.global_step, 2.5))


def train(*callbacks):
    """What the Trainer says it logged."""
    trainer = gpt2_trainer(
        f"{folder}/out", *callbacks, rows=40, evaluates=True, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=2,
        eval_strategy="steps", eval_steps=4, save_strategy="no",
    )  # fmt: skip
    trainer.train()
    perfagent.finish()
    return of_transformers(trainer)


report(f"{folder}/alone", train())

perfagent.attach(record=f"{folder}/forwarding/record")
own = []
writer = SummaryWriter(f"{folder}/tb")
logged = train(TensorBoardCallback(writer), Own(SummaryWriter(f"{folder}/tb-own"), own))
report(f"{folder}/forwarding", logged + own)
writer.close()
board = EventAccumulator(f"{folder}/tb").Reload()
tags = board.Tags()["scalars"]
assert {(tag, event.step) for tag in tags for event in board.Scalars(tag)} == {(name, step) for name, step, _ in logged}

perfagent.attach(record=f"{folder}/off/record", capture_logs=False)
train()
