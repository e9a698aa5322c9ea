"""Trainers that are stopped from afar end by their own flags, after the step that was named, with a checkpoint of it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from agent.frameworks.running import printed

HUGGINGFACE = """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    perfagent.attach(record="record", stoppable=True)
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 61, "n_positions": 16}
    samples = [{"input_ids": row, "labels": row} for row in torch.randint(0, 61, (16, 12))]
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, max_steps=20, report_to=[], save_steps=100, disable_tqdm=True,
        use_cpu=True,
    )

    class Asked(TrainerCallback):
        def on_step_begin(self, *_, **__):
            at_call()

    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, callbacks=[Asked()])
    trainer.train()
    step = trainer.state.global_step
    saved = [one.name for one in Path("out").glob("checkpoint-*")]
    if saved:
        trainer.train(resume_from_checkpoint=f"out/{saved[0]}")
"""

LIGHTNING = """
    import logging, warnings
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    perfagent.attach(record="record", stoppable=True)

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            at_call()
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    kept = pl.callbacks.ModelCheckpoint(dirpath="out", every_n_train_steps=1000, save_on_train_epoch_end=False)
    trainer = pl.Trainer(max_epochs=9, accelerator="cpu", devices=1, logger=False, callbacks=[kept],
                         enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Task(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4))
    step = trainer.global_step
    saved = [one.name for one in Path("out").glob("stopped-*")]
    for one in saved:
        assert torch.load(f"out/{one}", weights_only=False)["global_step"] == step
"""

SCRIPT = """
import json
from pathlib import Path
import torch
import perfagent
from perfagent.step.state import state

calls = 0

def at_call():
    global calls
    calls += 1
    if calls == 4:  # in the fourth step
        command = {"id": "c1", "kind": "stop", "params": {"step": 6, "saves": SAVES}}
        state.current.links.investigator.obey(command)
"""


@pytest.mark.real
@pytest.mark.parametrize(
    ("script", "saves", "left"),
    [
        pytest.param(HUGGINGFACE, True, ["checkpoint-6"], id="huggingface"),
        pytest.param(HUGGINGFACE, False, [], id="huggingface-nan"),
        pytest.param(LIGHTNING, True, ["stopped-step=6.ckpt"], id="lightning"),
        pytest.param(LIGHTNING, False, [], id="lightning-nan"),
    ],
)
def test_a_trainer_ends_after_the_named_step(tmp_path: Path, script: str, saves: bool, left: list[str]) -> None:
    whole = SCRIPT.replace("SAVES", str(saves)) + textwrap.dedent(script) + "\nprint(json.dumps([step, saved]))\n"
    assert printed(tmp_path, whole) == [6, left]
