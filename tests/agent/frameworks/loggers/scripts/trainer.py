"""The Transformers Trainer with evaluations, three times: alone, with TensorBoard and a callback that logs, and not
captured.

Arguments: a folder.
"""

import sys

import torch
from said import report

import perfagent

folder = sys.argv[1]
perfagent.attach(record=f"{folder}/alone/record")  # before the import

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.integrations import TensorBoardCallback  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.set_verbosity_error()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.linear(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


class Own(TrainerCallback):
    """Logs something of its own while the Trainer logs."""

    def __init__(self, writer, logged):
        self.writer, self.logged = writer, logged

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.writer.add_scalar("own/loss", 2.5, state.global_step)
        self.logged.append(("own/loss", state.global_step, 2.5))


def train(callbacks=()):
    """What the Trainer says it logged."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(40)]
    arguments = TrainingArguments(
        output_dir=f"{folder}/out", per_device_train_batch_size=4, num_train_epochs=1, logging_steps=2, eval_strategy="steps",
        eval_steps=4, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model=Model(), args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[*callbacks])
    trainer.train()
    perfagent.finish()
    return [
        (f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}", entry["step"], value)
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if name != "step"
    ]


report(f"{folder}/alone", train())

perfagent.attach(record=f"{folder}/forwarding/record")
own = []
writer = SummaryWriter(f"{folder}/tb")
logged = train([TensorBoardCallback(writer), Own(SummaryWriter(f"{folder}/tb-own"), own)])
report(f"{folder}/forwarding", logged + own)
writer.close()
board = EventAccumulator(f"{folder}/tb").Reload()
tags = board.Tags()["scalars"]
assert {(tag, event.step) for tag in tags for event in board.Scalars(tag)} == {(name, step) for name, step, _ in logged}

perfagent.attach(record=f"{folder}/off/record", capture_logs=False)
train()
