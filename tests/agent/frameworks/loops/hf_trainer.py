"""The Transformers Trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from script import Script
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging


def train(script: Script, accumulate: str = "1") -> None:
    """A tiny GPT-2, the Trainer's own clipping and schedule, evaluation every two steps; the truth is the Trainer's
    log."""
    logging.set_verbosity_error()
    script.attach()
    window = int(accumulate)
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 61, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    rows = torch.randint(0, 61, (4 * 6 * window, 12), generator=torch.Generator().manual_seed(2))
    samples = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(Path(script.folder) / "out"), per_device_train_batch_size=4, gradient_accumulation_steps=window,
        num_train_epochs=1, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
        eval_strategy="steps", eval_steps=2, learning_rate=1e-3,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples[:8])
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            truth = {"loss": entry["loss"], "lr": entry["learning_rate"], "norm": entry["grad_norm"]}
            script.step(**truth, samples=4 * window, tokens=48 * window)
    script.produced(model)
