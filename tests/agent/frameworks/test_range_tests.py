"""A search that a framework makes before it trains is no part of the training that is recorded."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment
from preloaded import run

SCRIPT = """
    import json, logging, warnings
    import perfagent, torch
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses = []

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lr, self.batch_size = 0.01, 4
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            loss = self.layer(batch[0]).square().mean()
            losses.append(loss.item())
            return loss

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=self.batch_size)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    task = Task()
    perfagent.attach(task, record="record")
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    tuner = Tuner(trainer)
    tuner.scale_batch_size(task, mode="power", steps_per_trial=2, init_val=2, max_trials=2)
    searched = [len(losses)]
    tuner.lr_find(task, min_lr=1e-3, max_lr=100.0, num_training=20, early_stop_threshold=None, update_attr=False)
    searched.append(len(losses))
    trainer.fit(task)
    perfagent.finish()
    print(json.dumps([searched, losses[searched[1]:]]))
"""


@pytest.mark.real
def test_searches_of_lightning_are_no_steps_of_the_run(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    [done] = run([str(path)], tmp_path, [job_environment(tmp_path / "environment", OMP_NUM_THREADS="1")])
    assert done.returncode == 0, done.stderr[-3000:]
    searched, losses = json.loads(done.stdout.splitlines()[-1])
    assert 0 < searched[0] < searched[1] - 10
    recorded = Recording(tmp_path / "record").series("loss")
    assert recorded == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, start=1)]
