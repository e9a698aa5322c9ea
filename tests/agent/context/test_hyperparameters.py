"""What a script is configured with, found where scripts keep it."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfagent.context.hyperparameters import Hyperparameters
from perfagent.redaction import redacted


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


def looked() -> Hyperparameters:
    """From the function that calls this."""
    found = Hyperparameters()
    found.search_frames(sys._getframe(1))
    return found


def of_variables(**variables: Any) -> dict[str, Any]:
    """What is found in a function of a script with these variables."""
    lines = [f"    {name} = given.pop({name!r})" for name in variables]
    script = "\n".join(["def main(given, look):", *lines, "    return look()"])
    names: dict[str, Any] = {}
    exec(compile(script, "/home/me/train.py", "exec"), names)
    return names["main"](variables, looked).found()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--lr", type=float, default=0.5)
    made.add_argument("--deepspeed_config")
    return made


# ---- argparse


@pytest.fixture
def watched() -> Iterator[Hyperparameters]:
    original = argparse.ArgumentParser.parse_known_args
    found = Hyperparameters()
    found.watch_argparse()
    yield found
    found.close()
    assert argparse.ArgumentParser.parse_known_args is original


def test_the_last_result_of_the_scripts_own_argparse_counts(
    watched: Hyperparameters, capsys: pytest.CaptureFixture[str]
) -> None:
    inside: dict[str, Any] = {}
    library = "def parse(parser): return parser.parse_args(['--lr', '9'])\n"
    exec(compile(library, "/usr/lib/python3/site-packages/library.py", "exec"), inside)
    assert inside["parse"](parser()).lr == 9
    with pytest.raises(SystemExit):
        parser().parse_args(["--lr", "x"])
    assert "invalid float value" in capsys.readouterr().err
    assert watched.found() == {}
    parser().parse_args(["--lr", "1"])
    arguments, rest = parser().parse_known_args(["--lr", "2", "--other"])
    assert rest == ["--other"]
    assert watched.found()["argparse"] is arguments
    outer = parser()
    train = outer.add_subparsers(dest="what").add_parser("train")
    train.add_argument("--epochs", type=int, default=3)
    outer.parse_args(["--lr", "2", "train"])
    assert vars(watched.found()["argparse"]) == {"lr": 2.0, "deepspeed_config": None, "what": "train", "epochs": 3}


# ---- variables


class CFG:
    lr = 1e-3
    layers = (1, 2)

    def build(self) -> None: ...


class Baseline(CFG):
    epochs = 3

    def __init__(self) -> None:
        self.lr = 0.5
        self._private = 1


class Attributes(dict[str, Any]):
    """As EasyDict, Munch and yacs have it."""


def test_configuration_is_found_by_name_and_kind() -> None:
    given: dict[str, Any] = {
        "args": parser().parse_args([]), "config": {"lr": 0.1, "betas": (0.9, 0.95)}, "model_args": Settings(),
        "opt": SimpleNamespace(momentum=0.9), "cfg": CFG, "configuration": Baseline(),
        "opts": Attributes(lr=0.5), "hparams": {"lr": 0.5, "seed": 1, "weights": torch.ones(3)},
    }  # fmt: skip
    found = of_variables(**given, params={"weight": torch.ones(3)}, state={"lr": 0.1})
    assert found["argparse"] is given.pop("args")
    assert found["config"] is given["config"]
    assert {name: redacted(found.get(name)) for name in given} == {
        "config": {"lr": 0.1, "betas": [0.9, 0.95]}, "model_args": {"lr": 0.1}, "opt": {"momentum": 0.9},
        "cfg": {"lr": 1e-3, "layers": [1, 2]}, "configuration": {"lr": 0.5, "layers": [1, 2], "epochs": 3},
        "opts": {"lr": 0.5}, "hparams": {"lr": 0.5, "seed": 1},
    }  # fmt: skip
    assert not {"params", "state"} & found.keys()


@pytest.mark.frameworks
def test_settings_of_trainers_are_found_under_any_name() -> None:
    from lightning import LightningModule
    from transformers import TrainingArguments

    class Mine(LightningModule):
        def __init__(self, lr: float, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    arguments = TrainingArguments(output_dir="x", learning_rate=1e-3, use_cpu=True, report_to=[])
    found = of_variables(anything=arguments, other=Mine(0.1, width=3))
    assert found["huggingface"] is arguments
    assert dict(found["lightning"]) == {"lr": 0.1, "width": 3}


def test_options_of_click_are_found_in_the_running_command() -> None:
    click = pytest.importorskip("click")
    found: dict[str, Any] = {}

    @click.command()
    @click.option("--lr", default=0.5)
    @click.option("--api-key", default="hunter2secret")
    def main(lr: float, api_key: str) -> None:
        found.update(looked().found())

    main([], standalone_mode=False)
    assert redacted(found["click"]) == {"lr": 0.5, "api_key": "[redacted]"}


def test_a_configuration_of_hydra_is_found_as_it_is_written() -> None:
    """Resolving it would run code, raise for what is missing, and read secrets from elsewhere."""
    written = {"lr": 0.1, "again": "${lr}", "later": "???", "from": "${oc.env:NOT_SET_ANYWHERE}"}
    config = pytest.importorskip("omegaconf").OmegaConf.create(written | {"hub_token": "plainword"})
    found = of_variables(anything=config)["hydra"]
    assert redacted(found) == written | {"hub_token": "[redacted]"}


# ---- without a trace in the script


def test_looking_keeps_nothing_alive() -> None:
    """A function's f_locals would hold its variables until it returns: a checkpoint that was loaded and let go of."""

    class Args(argparse.Namespace): ...

    def main() -> tuple[Hyperparameters, object, weakref.ref[Any]]:  # without an assert: pytest's calls locals()
        checkpoint = torch.ones(10)
        args = Args(lr=0.1, api_key="plainword")
        gone = weakref.ref(checkpoint)
        found = looked()
        del checkpoint
        gc.collect()
        return found, gone(), weakref.ref(args)

    found, left, args = main()
    found.settle()
    gc.collect()
    assert (left, args(), found.found()["argparse"]) == (None, None, {"lr": 0.1, "api_key": "[redacted]"})
