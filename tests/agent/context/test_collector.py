from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import RecordingSender
from torch.nn.utils import prune
from torch.utils.tensorboard import SummaryWriter

from perfagent.context.collector import AGAIN_S, Context


class Gathered:
    def __init__(self, folder: Path, config: dict[str, Any], *, rank: int = 0) -> None:
        self.sender, self.now = RecordingSender(folder), 0.0
        self.sender.identity.rank = rank
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.context = Context(
            self.sender,  # type: ignore[arg-type]
            config,
            lambda: self.model,
            lambda: self.optimizer,
            clock=lambda: self.now,
        )
        self.context.install()

    def told(self) -> list[dict[str, Any]]:
        """What was told since the last time."""
        self.context.poll()
        events = [data for kind, data, _ in self.sender.events if kind == "context"]
        self.sender.events.clear()
        return events


def test_what_files_tell_is_told_early_and_the_rest_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    gathered = Gathered(tmp_path, {"depth": 3})
    first, files = gathered.told()
    assert sorted(first) == ["config", "environment", "git"]
    assert files["packages"]["torch"]
    assert files["git"]["dirty"] in (True, False)
    assert gathered.told() == []
    gathered.context.first_step()
    (rest,) = gathered.told()
    gathered.context.close()
    assert sorted(rest) == ["config"]
    config = rest["config"]
    assert config["depth"] == 3
    assert config["model"] == {"class": "Linear", "parameters": 10, "trainable_parameters": 10}
    assert (config["optimizer"]["class"], config["optimizer"]["lr"], config["optimizer"]["momentum"]) == (
        "SGD",
        0.1,
        0.9,
    )


def test_a_model_whose_sizes_are_not_known_yet_is_told_without_a_number(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path, {})
    gathered.model = torch.nn.LazyLinear(2)
    assert gathered.told()[0]["config"]["model"] == {"class": "LazyLinear"}
    gathered.model(torch.ones(1, 4))
    gathered.context.first_step()
    (rest,) = gathered.told()
    assert rest["config"]["model"] == {"class": "Linear", "parameters": 10, "trainable_parameters": 10}


def test_what_the_user_says_stands_above_what_is_found(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path, {"model": "mine"})
    gathered.context.first_step()
    assert [told["config"]["model"] for told in gathered.told()] == ["mine", "mine"]
    gathered.context.close()


def test_a_change_of_the_configuration_is_told(tmp_path: Path) -> None:
    config: dict[str, Any] = {"nested": {"lr": 0.1}, "nan": float("nan")}
    gathered = Gathered(tmp_path, config)
    gathered.context.first_step()
    gathered.told()
    gathered.now += AGAIN_S
    assert gathered.told() == []
    config["nested"]["lr"] = 0.2
    assert gathered.told() == []
    gathered.now += AGAIN_S
    assert [told["config"]["nested"] for told in gathered.told()] == [{"lr": 0.2}]
    config["late"] = 1
    gathered.sender.closing_at = 1.0
    assert [told["config"]["late"] for told in gathered.told()] == [1]
    gathered.context.close()


def test_what_other_loggers_were_given_as_settings_is_in_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any
) -> None:
    """W&B's config as its run has it, also what is set later; TensorBoard's hyperparameters by the real writer."""
    monkeypatch.setitem(
        sys.modules, "wandb", wandb := SimpleNamespace(run=SimpleNamespace(config={"lr": 0.1, "bs": 32}))
    )
    recorded = record(capture_logs=True)
    gathered = Gathered(tmp_path, {"mine": 1})
    gathered.context.first_step()
    assert gathered.told()[-1]["config"]["wandb"] == {"lr": 0.1, "bs": 32}
    wandb.run.config["lr"] = 0.2
    with SummaryWriter(str(tmp_path / "board")) as writer:
        writer.add_hparams({"depth": 3, "activation": "relu"}, {"hparam/accuracy": 0.5})
    wandb.run = None
    gathered.sender.closing_at = 1.0
    config = gathered.told()[-1]["config"]
    assert config["wandb"] == {"lr": 0.1, "bs": 32}, "as it was when W&B's run was looked at last"
    assert config["tensorboard"] == {"depth": 3, "activation": "relu"}
    gathered.context.close()
    recorded.run.finish()
    assert "tensorboard" not in Gathered(tmp_path, {}).told()[-1]["config"], "a new run has settings of its own"


def test_a_setting_that_a_script_changes_in_wandb_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = SimpleNamespace(run=SimpleNamespace(config={"lr": 0.1}))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    gathered = Gathered(tmp_path, {})
    gathered.context.first_step()
    gathered.told()
    wandb.run.config["lr"] = 0.2
    gathered.now += AGAIN_S
    assert [told["config"]["wandb"] for told in gathered.told()] == [{"lr": 0.2}]
    gathered.context.close()


def test_what_was_done_to_the_model_in_the_course_of_the_training_is_told_at_its_end(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path, {})
    gathered.context.first_step()
    assert "techniques" not in gathered.told()[-1]["config"]
    prune.l1_unstructured(gathered.model, "weight", amount=0.25)
    gathered.sender.closing_at = 1.0
    assert [told["config"]["techniques"]["pruning"]["pruned_pct"] for told in gathered.told()] == [pytest.approx(25.0)]
    gathered.context.close()


def test_a_technique_that_was_told_stays_told(tmp_path: Path) -> None:
    """Pruning that is made permanent before the script ends."""
    config: dict[str, Any] = {}
    gathered = Gathered(tmp_path, config)
    prune.l1_unstructured(gathered.model, "weight", amount=0.25)
    assert "pruning" in gathered.told()[0]["config"]["techniques"]
    prune.remove(gathered.model, "weight")
    config["late"] = 1
    gathered.sender.closing_at = 1.0
    assert gathered.told()[-1]["config"]["techniques"]["pruning"]["pruned_pct"] == pytest.approx(25.0)
    gathered.context.close()


def test_a_process_that_ends_at_once_tells_everything_at_its_end(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path, {"depth": 3})
    gathered.sender.closing_at = 1.0
    told = gathered.told()
    gathered.context.close()
    assert told[-1]["config"]["depth"] == 3
    assert "packages" in told[-1]


def test_other_ranks_say_nothing(tmp_path: Path) -> None:
    gathered = Gathered(tmp_path, {"depth": 3}, rank=1)
    gathered.context.first_step()
    assert gathered.sender.sources == []
    assert gathered.told() == []


def test_a_model_is_told_by_what_is_wrapped_with_its_configuration(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    gathered = Gathered(tmp_path, {})
    gathered.model = torch.nn.DataParallel(
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=11, n_positions=8))
    )
    gathered.context.first_step()
    told = gathered.told()[-1]["config"]["model"]
    gathered.context.close()
    assert told["class"] == "GPT2LMHeadModel"
    assert told["parameters"] == sum(p.numel() for p in gathered.model.parameters())
    assert (told["config"]["n_embd"], told["config"]["vocab_size"]) == (8, 11)


def test_what_was_found_is_not_kept_alive(tmp_path: Path) -> None:
    class Config(dict[str, Any]):
        pass

    config = Config(lr=0.1)
    gathered = Gathered(tmp_path, {})
    gathered.context.hyperparameters._found["config"] = config
    gathered.context.first_step()
    gathered.told()
    gone = weakref.ref(config)
    del config
    gc.collect()
    gathered.context.close()
    assert gone() is None
