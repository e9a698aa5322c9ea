"""Small trainings with the Transformers Trainer and with Lightning, for the scripts of these tests."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from typing import Any, ClassVar

import torch

__all__ = ["gpt2_trainer", "lightning_task", "lightning_trainer"]

warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


def gpt2_trainer(folder: str, *callbacks: Any, rows: int = 16, evaluates: bool = False, **arguments: Any) -> Any:
    """The Trainer of a tiny GPT-2. arguments: of TrainingArguments."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 61, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    tokens = torch.randint(0, 61, (rows, 12), generator=torch.Generator().manual_seed(2))
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    usual = {"per_device_train_batch_size": 2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    given = transformers.TrainingArguments(output_dir=folder, **usual | arguments)
    held_out = samples[:8] if evaluates else None
    return transformers.Trainer(model, given, train_dataset=samples, eval_dataset=held_out, callbacks=[*callbacks])


def lightning_trainer(package: str = "lightning.pytorch", **options: Any) -> Any:
    usual = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return import_module(package).Trainer(**usual | quiet | options)


def lightning_task() -> Any:
    """A class of modules of two layers, which keep their losses in `losses` of the class."""
    from lightning.pytorch import LightningModule

    class Task(LightningModule):
        losses: ClassVar[list[float]] = []

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.second(self.first(batch[0])).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Task
