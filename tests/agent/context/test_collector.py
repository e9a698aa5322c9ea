"""When the context of a run is told: early, after the first step, when it changed, and at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import RecordingSender
from canaries import BY_VALUE
from torch.nn.utils import prune
from torch.utils.tensorboard import SummaryWriter

from perfagent.context.collector import AGAIN_S, Context
from perfagent.context.environment import environment
from perfagent.redaction import redacted


class Gathered:
    def __init__(self, folder: Path, config: dict[str, Any], rank: int) -> None:
        self.sender, self.now = RecordingSender(folder), 0.0
        self.sender.identity.rank = rank
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.context = Context(self.sender, config, lambda: self.model, lambda: self.optimizer, clock=lambda: self.now)
        self.context.install()

    def told(self) -> list[dict[str, Any]]:
        """What was told since the last time."""
        self.context.poll()
        events = [data for kind, data, _ in self.sender.events if kind == "context"]
        self.sender.events.clear()
        return events

    def after_first_step(self) -> dict[str, Any]:
        self.context.first_step()
        return self.told()[-1]["config"]

    def at_end(self) -> dict[str, Any]:
        self.sender.closing_at = 1.0
        return self.told()[-1]


Gather = Callable[..., Gathered]


@pytest.fixture
def gather(tmp_path: Path) -> Iterator[Gather]:
    made: list[Gathered] = []

    def gather(config: dict[str, Any] | None = None, rank: int = 0) -> Gathered:
        made.append(Gathered(tmp_path, {} if config is None else config, rank))
        return made[-1]

    yield gather
    for one in made:
        one.context.close()


def test_files_are_told_early_and_the_rest_after_the_first_step(
    gather: Gather, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    other, gathered = gather(rank=1), gather({"depth": 3})
    first, files = gathered.told()
    assert sorted(first) == ["config", "environment", "git"]
    assert files["packages"]["torch"]
    assert gathered.told() == []
    config = gathered.after_first_step()
    assert config["depth"] == 3
    assert config["model"] == {"class": "Linear", "parameters": 10, "trainable_parameters": 10}
    assert config["optimizer"].items() >= {"class": "SGD", "lr": 0.1, "momentum": 0.9}.items()
    other.context.first_step()
    assert other.sender.sources == other.told() == [], "other ranks say nothing"


def test_a_change_of_the_configuration_is_told(gather: Gather) -> None:
    config: dict[str, Any] = {"nested": {"lr": 0.1}, "nan": float("nan")}
    gathered = gather(config)
    gathered.after_first_step()
    gathered.now += AGAIN_S
    assert gathered.told() == []
    config["nested"]["lr"] = 0.2
    gathered.now += 0.9 * AGAIN_S
    assert gathered.told() == []
    gathered.now += 0.1 * AGAIN_S
    assert [told["config"]["nested"] for told in gathered.told()] == [{"lr": 0.2}]
    config["late"] = 1
    assert gathered.at_end()["config"]["late"] == 1


def test_settings_that_other_loggers_got_are_configuration(
    gather: Gather, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any
) -> None:
    """W&B's config as its run has it, also what is set later; TensorBoard's hyperparameters by the real writer."""
    wandb = SimpleNamespace(run=SimpleNamespace(config={"lr": 0.1, "bs": 32}))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    recorded = record(capture_logs=True)
    gathered = gather({"mine": 1})
    assert gathered.after_first_step()["wandb"] == {"lr": 0.1, "bs": 32}
    wandb.run.config["lr"] = 0.2
    gathered.now += AGAIN_S
    assert [told["config"]["wandb"]["lr"] for told in gathered.told()] == [0.2]
    wandb.run.config["lr"] = 0.3
    with SummaryWriter(str(tmp_path / "board")) as writer:
        writer.add_hparams({"depth": 3, "activation": "relu"}, {"hparam/accuracy": 0.5})
    wandb.run = None
    config = gathered.at_end()["config"]
    assert config["wandb"] == {"lr": 0.2, "bs": 32}, "as it was when W&B's run was looked at last"
    assert config["tensorboard"] == {"depth": 3, "activation": "relu"}
    recorded.run.finish()
    assert "tensorboard" not in gather().told()[-1]["config"], "a new run has settings of its own"


def test_techniques_are_told_and_those_of_later_at_the_end(gather: Gather) -> None:
    """Also what is done to the model in the course of the training."""
    gathered = gather()
    gathered.model.weight.requires_grad_(False)

    def train() -> dict[str, Any]:
        teacher = torch.nn.Sequential(torch.nn.Linear(8, 8))  # noqa: F841 - found among the variables
        return gathered.after_first_step()["techniques"]

    told = train()
    assert (told["frozen"]["trainable_pct"], told["distillation"]["teacher"]) == (20.0, "Sequential")
    prune.l1_unstructured(gathered.model, "weight", amount=0.25)
    pruning = gathered.at_end()["config"]["techniques"]["pruning"]
    told = {"methods": ["L1Unstructured"], "tensors": 1, "pruned_pct": 25.0, "saved_bytes": 0}
    assert pruning.items() >= told.items()


@pytest.mark.fault
def test_x10_of_the_environment_only_what_is_on_the_list_is_told() -> None:
    told = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "OMP_NUM_THREADS": "4"}
    others = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "HOME", "PATH")
    assert environment(told | dict.fromkeys(others, "x")) == told
    assert environment({"NCCL_X": "y" * 5000}) == {"NCCL_X": "y" * 1000}


def test_a_process_that_ends_at_once_tells_everything(gather: Gather, tmp_path: Path) -> None:
    """Versions of packages whatever these are called; what the user says stands above what is found."""
    names = ("authlib-1.3.0", "google_auth-1.3.0", "python_jwt-1.3.0", f"odd-1.0+{BY_VALUE['hf']}")
    for name in names:
        (tmp_path / "site" / f"{name}.dist-info").mkdir(parents=True)
    sys.path.insert(0, str(tmp_path / "site"))
    try:
        told = gather({"depth": 3, "model": "mine", "packages": {"authlib": "open sesame"}}).at_end()
    finally:
        sys.path.remove(str(tmp_path / "site"))
    assert told["config"].items() >= {"depth": 3, "model": "mine"}.items()
    shown = redacted(told)
    assert {shown["packages"][name] for name in ("authlib", "google-auth", "python-jwt")} == {"1.3.0"}
    assert (BY_VALUE["hf"] in str(shown), "open sesame" in str(shown)) == (False, False)
