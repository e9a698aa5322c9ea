"""What is recognised by name is there under that name in the versions that are installed."""

from __future__ import annotations

import importlib
import sys
import time

import pytest
import torch

from perfagent.hooks.checkpoint_saves import SAVERS
from perfagent.hooks.collectives import COLLECTIVES
from perfagent.hooks.evaluation import ENVIRONMENTS, EVALUATORS, GENERATORS, after_last_step

TABLES = (SAVERS, EVALUATORS, ENVIRONMENTS, GENERATORS)
NAMES = [(module, name) for table in TABLES for module, names in table.items() for name in names]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_functions_that_are_recognised_exist(module, name):
    owner = importlib.import_module(module) if module.startswith("torch") else pytest.importorskip(module)
    *classes, attribute = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    assert attribute in vars(owner)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(module, text): what imports a module of that name and text, whether or not there is such a package."""
    known = {}

    def make(name, text):
        package = name.split(".")[0]
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True)
        file.write_text(text)
        for folder in [*file.relative_to(tmp_path).parents][:-1]:
            (tmp_path / folder / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        known[package] = {each: sys.modules.pop(each) for each in loaded(package)}
        return lambda: importlib.import_module(name)

    def loaded(package):
        return [each for each in sys.modules if each.split(".")[0] == package]

    yield make
    for package, modules in known.items():
        for each in loaded(package):
            del sys.modules[each]
        sys.modules.update(modules)


def test_a_validator_is_an_evaluation_though_no_end_of_its_loader_is_seen(record, stand_in):
    """That of Ultralytics asks an average of the weights, with a loader whose iterator never ends."""
    validator = stand_in(
        "ultralytics.engine.validator",
        "class BaseValidator:\n"
        "    def __call__(self, model, batches):\n"
        "        return [model(next(batches)) for _ in range(3)]\n",
    )
    recorded = record()
    validate = type("Validator", (validator().BaseValidator,), {})()
    model = torch.nn.Linear(4, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(6):
        train(model, optimizer)
        if number == 3:
            with torch.no_grad():
                validate(average, iter(torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=2)))
    assert [step for step, _ in recorded.of("phase/eval_s")] == [5]


@pytest.fixture
def environment(stand_in):
    """Makes one of gym's: imported behind the run's start, as a script that asks for it late does."""
    name = "gym.wrappers.order_enforcing"
    module = stand_in(
        name, "class OrderEnforcing:\n    def step(self, action):\n        return action.cos().expand(1, 4)\n"
    )
    return lambda: module().OrderEnforcing()


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_acts_in_an_environment_is_not_evaluated(record, environment, training):
    """Proximal policy optimization in one file, and as Stable-Baselines3 has it: its policy acts in evaluation mode."""
    policy = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    recorded = record(policy)
    environment = environment()
    for number in range(1, 13):
        if number % 4 == 0:
            policy.train(training)
            seen = torch.ones(1, 4)
            with torch.no_grad():
                for _ in range(20):
                    seen = environment.step(policy(seen))
                policy(seen)
            policy.train()
        if number == 6:
            policy.eval()
            with torch.no_grad():
                [policy(batch) for batch in torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)]
            policy.train()
        train(policy, optimizer)
    steps = {name: [step for step, _ in recorded.of(f"phase/{name}_s")] for name in ("rollout", "eval")}
    assert steps == {"rollout": [4, 8, 12], "eval": [6]}


def test_a_model_that_acts_in_training_mode_is_evaluated_in_the_other_one(record, environment):
    """Q-learning: it acts in every step, and now and then for a score."""
    policy = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    recorded = record(policy)
    environment = environment()
    seen = torch.ones(1, 4)
    for number in range(1, 13):
        with torch.no_grad():
            seen = environment.step(policy(seen))
            if number == 8:
                policy.eval()
                for _ in range(20):
                    environment.step(policy(seen))
                policy.train()
        train(policy, optimizer)
    assert [step for step, _ in recorded.of("phase/eval_s")] == [8]


def train(model, optimizer):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()


def test_most_collectives_exist():
    import torch.distributed as dist

    missing = {name for name in COLLECTIVES if not hasattr(dist, name)}
    assert missing <= {"all_gather_single", "reduce_scatter_single"}, "those came with torch 2.13"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
def test_what_a_model_in_training_writes_is_a_rollout(record, training):
    """Rollouts, of which each feeds some steps: GRPO."""
    transformers = pytest.importorskip("transformers")
    import torch

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=32)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    spent = {}
    for step in range(1, 13):
        if step % 4 == 1:
            began = time.perf_counter()
            model.train(training)
            tokens = model.generate(
                torch.ones(2, 4, dtype=torch.long), min_new_tokens=12, max_new_tokens=12, pad_token_id=0
            )
            model.train()
            with torch.no_grad():
                model(tokens)  # how probable it was, as the policy stands
            spent[step] = time.perf_counter() - began
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = dict(recorded.steps())
    evaluations = [step for step, values in steps.items() if "phase/eval_s" in values]
    if not training:
        assert evaluations[-2:] == [5, 9]
        return
    assert evaluations == [], "how probable a rollout was is asked with it"
    assert [step for step, values in steps.items() if "phase/rollout_s" in values] == [1, 5, 9]
    for step in (5, 9):
        assert (
            spent[step] * 0.8
            <= steps[step]["phase/rollout_s"] + steps[step]["phase/forward_s"]
            <= steps[step]["step_time_s"]
        )


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
