"""What is recognised by name is there under that name in the versions that are installed."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

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


@pytest.fixture
def validator(tmp_path, monkeypatch):
    """A module of that name, as Ultralytics has it."""
    name = "ultralytics.engine.validator"
    (tmp_path / "ultralytics" / "engine").mkdir(parents=True)
    (tmp_path / "ultralytics" / "engine" / "validator.py").write_text(
        "class BaseValidator:\n"
        "    def __call__(self, model, batches):\n"
        "        return [model(next(batches)) for _ in range(3)]\n"
    )
    known = {module: sys.modules.pop(module) for module in [*sys.modules] if module.split(".")[0] == "ultralytics"}
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: importlib.import_module(name)
    for module in [one for one in sys.modules if one.split(".")[0] == "ultralytics"]:
        del sys.modules[module]
    sys.modules.update(known)


def test_a_validator_is_an_evaluation_though_no_end_of_its_loader_is_seen(record, validator):
    """It asks an average of the weights, with a loader whose iterator never ends."""
    recorded = record()
    validate = type("Validator", (validator().BaseValidator,), {})()
    model = torch.nn.Linear(4, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        if number == 3:
            with torch.no_grad():
                validate(average, iter(torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=2)))
    assert [step for step, _ in recorded.of("phase/eval_s")] == [5]


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
