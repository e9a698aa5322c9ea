"""The Transformers Trainer."""

from __future__ import annotations

from script import Script
from trainers import gpt2_trainer


def train(script: Script, accumulate: str = "1") -> None:
    """A tiny GPT-2, the Trainer's own clipping and schedule, evaluation every two steps; the truth is the Trainer's
    log."""
    script.attach()
    window = int(accumulate)
    trainer = gpt2_trainer(
        f"{script.folder}/out", rows=4 * 6 * window, evaluates=True, per_device_train_batch_size=4, num_train_epochs=1,
        gradient_accumulation_steps=window, logging_steps=1, save_strategy="no", eval_strategy="steps", eval_steps=2,
        learning_rate=1e-3,
    )  # fmt: skip
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            truth = {"loss": entry["loss"], "lr": entry["learning_rate"], "norm": entry["grad_norm"]}
            script.step(**truth, samples=4 * window, tokens=48 * window)
    script.produced(trainer.model)
