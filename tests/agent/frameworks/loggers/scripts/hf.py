"""The Transformers Trainer with evaluations and TensorBoard: what its callbacks were given, and what TensorBoard
got."""

import sys

import torch
from said import report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import perfagent

logging.set_verbosity_error()
torch.manual_seed(0)
folder = sys.argv[1]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.linear(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


class Own(TrainerCallback):
    """A callback of the script's that logs something of its own while the Trainer logs."""

    def __init__(self):
        self.writer = SummaryWriter(f"{folder}/own")

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.writer.add_scalar("own/twice_epoch", 2 * logs["epoch"], state.global_step)
        own.append(("own/twice_epoch", state.global_step, 2 * logs["epoch"]))


own = []
data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(40)]
arguments = TrainingArguments(
    output_dir=folder, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=2, eval_strategy="steps", eval_steps=5,
    report_to=sys.argv[2:], save_strategy="no", disable_tqdm=True, use_cpu=True, logging_dir=f"{folder}/tb",
)  # fmt: skip
trainer = Trainer(model=Model(), args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[Own()])
perfagent.attach()
trainer.train()
perfagent.finish()
logged = []
for entry in trainer.state.log_history:
    for name, value in entry.items():
        if name != "step" and isinstance(value, (int, float)):
            written = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
            logged.append((written, entry["step"], value))
print(
    "events", sum(len(EventAccumulator(p).Reload().Tags()["scalars"]) for p in [f"{folder}/tb"]) if sys.argv[2:] else 0
)
report(logged + own)
