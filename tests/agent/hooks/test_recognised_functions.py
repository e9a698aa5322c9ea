"""What is recognised by name is there under that name in the versions that are installed."""

from __future__ import annotations

import importlib

import pytest

from perfagent.hooks.checkpoint import SAVERS
from perfagent.hooks.communication import COLLECTIVES
from perfagent.hooks.evaluation import EVALUATORS, after_last_step

NAMES = [(module, name) for table in (SAVERS, EVALUATORS) for module, names in table.items() for name in names]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_functions_that_are_phases_exist(module, name):
    owner = importlib.import_module(module) if module.startswith("torch") else pytest.importorskip(module)
    *classes, attribute = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    assert attribute in vars(owner)


def test_most_collectives_exist():
    import torch.distributed as dist

    missing = {name for name in COLLECTIVES if not hasattr(dist, name)}
    assert missing <= {"all_gather_single", "reduce_scatter_single"}, "those came with torch 2.13"


@pytest.mark.filterwarnings("ignore")
def test_lightning_validates_and_saves_in_phases(record, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.inner(batch).square().mean()

        def validation_step(self, batch, index):
            self.log("score", self.inner(batch).square().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    recorded = record()
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        default_root_dir=tmp_path, num_sanity_val_steps=0,
    )  # fmt: skip
    loader = DataLoader(torch.ones(6, 4), batch_size=2)
    trainer.fit(Module(), loader, loader)
    after_last_step(recorded.run._progress)
    assert [number for number, _ in recorded.of("phase/eval_s")] == [4, 6]
    assert [number for number, _ in recorded.of("phase/checkpoint_s")] == [4]
    names = [data["name"] for kind, data, _ in recorded.sender.events if kind == "phase"]
    assert names.count("eval") == 2
    assert names.count("checkpoint") == 2
