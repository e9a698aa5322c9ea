from __future__ import annotations

import argparse
import dataclasses
import enum
import gc
import json
import math
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from perfagent.context import hyperparameters
from perfagent.context.hyperparameters import Hyperparameters, is_script
from perfagent.redaction import redacted


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


def looked() -> Hyperparameters:
    found = Hyperparameters()
    found.look(sys._getframe(1))
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--lr", type=float, default=0.5)
    made.add_argument("--deepspeed_config")
    return made


@pytest.fixture
def watched() -> Any:
    original = argparse.ArgumentParser.parse_known_args
    found = Hyperparameters()
    found.watch_argparse()
    yield found
    found.close()
    assert argparse.ArgumentParser.parse_known_args is original


def test_the_last_result_of_argparse_counts(watched: Hyperparameters) -> None:
    parser().parse_args(["--lr", "1"])
    arguments, rest = parser().parse_known_args(["--lr", "2", "--other"])
    assert rest == ["--other"]
    assert watched.found()["argparse"] is arguments


def test_subcommands_and_defaults_are_in_it(watched: Hyperparameters) -> None:
    outer = parser()
    train = outer.add_subparsers(dest="what").add_parser("train")
    train.add_argument("--epochs", type=int, default=3)
    outer.parse_args(["--lr", "2", "train"])
    assert vars(watched.found()["argparse"]) == {"lr": 2.0, "deepspeed_config": None, "what": "train", "epochs": 3}


def test_what_transformers_parses_for_dataclasses_of_the_script_is_in_it(watched: Hyperparameters) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    given = ["--lr", "2", "--output_dir", "x", "--learning_rate", "1", "--use_cpu"]
    mine, trainers, rest = HfArgumentParser((Settings, TrainingArguments)).parse_args_into_dataclasses(
        [*given, "--other"], return_remaining_strings=True
    )
    assert (mine, trainers.learning_rate, rest) == (Settings(lr=2.0), 1.0, ["--other"])
    assert watched.found()["argparse"] == {"lr": 2.0}


def test_what_a_library_parses_is_none_of_the_scripts(watched: Hyperparameters, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    library = folder / "library.py"
    library.write_text("def parse(parser): return parser.parse_args(['--lr', '9'])\n")
    inside: dict[str, Any] = {}
    exec(compile(library.read_text(), str(library), "exec"), inside)
    assert inside["parse"](parser()).lr == 9
    assert "argparse" not in watched.found()


def test_a_parser_that_raises_raises_as_ever(watched: Hyperparameters, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--lr", "x"])
    assert ended.value.code == 2
    assert "invalid float value" in capsys.readouterr().err
    assert watched.found() == {}


def test_someone_who_watches_after_us_stays(watched: Hyperparameters, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = argparse.ArgumentParser.parse_known_args

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", theirs)
        watched.close()
        assert argparse.ArgumentParser.parse_known_args is theirs
        parser().parse_args([])
        assert watched.found() == {}
    argparse.ArgumentParser.parse_known_args = ours.__wrapped__  # type: ignore[method-assign]


def test_configuration_in_the_variables_of_a_function_is_found_by_name_and_kind() -> None:
    def main() -> dict[str, Any]:
        args = parser().parse_args([])  # noqa: F841
        config = {"lr": 0.1, "betas": (0.9, 0.95)}  # noqa: F841
        model_args = Settings()  # noqa: F841
        opt = SimpleNamespace(momentum=0.9)  # noqa: F841
        params = {"weight": torch.ones(3)}  # noqa: F841 - not settings
        state = {"lr": 0.1}  # noqa: F841 - not called so
        return looked().found()

    found = main()
    assert {name: found[name] for name in ("argparse", "config", "model_args", "opt")} == {
        "argparse": argparse.Namespace(lr=0.5, deepspeed_config=None),
        "config": {"lr": 0.1, "betas": (0.9, 0.95)},
        "model_args": Settings(),
        "opt": SimpleNamespace(momentum=0.9),
    }
    assert "params" not in found
    assert "state" not in found


def test_training_arguments_are_found_wherever_they_are() -> None:
    from transformers import TrainingArguments

    class MyArguments(TrainingArguments):
        pass

    def trainer(anything: Any) -> dict[str, Any]:
        return looked().found()

    given = MyArguments(output_dir="x", learning_rate=1e-3, use_cpu=True, report_to=[])
    assert trainer(given)["huggingface"] is given


def test_hparams_of_a_lightning_module_are_found() -> None:
    from lightning import LightningModule

    class Mine(LightningModule):
        def __init__(self, lr: float, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def optimizer_step(self) -> dict[str, Any]:
            return looked().found()

    assert dict(Mine(0.1, width=3).optimizer_step()["lightning"]) == {"lr": 0.1, "width": 3}


def test_the_file_of_deepspeed_is_read(tmp_path: Path, watched: Hyperparameters) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    parser().parse_args(["--deepspeed_config", str(file)])
    assert watched.found()["deepspeed"] == {"zero_optimization": {"stage": 2}}
    file.write_text("{")
    assert "deepspeed" not in watched.found()
    parser().parse_args(["--deepspeed_config", "/etc/passwd"])
    assert "deepspeed" not in watched.found()


def test_looking_keeps_nothing_alive() -> None:
    """A function's f_locals would hold its variables until it returns: a checkpoint that was loaded and let go of."""

    def main() -> tuple[Hyperparameters, bool]:  # without an assert: pytest's calls locals()
        checkpoint = torch.ones(10)
        config = {"lr": 0.1}  # noqa: F841
        alive = weakref.ref(checkpoint)
        found = looked()
        del checkpoint
        gc.collect()
        return found, alive() is not None

    found, alive = main()
    assert found.found()["config"] == {"lr": 0.1}
    assert not alive


def test_a_function_that_uses_locals_is_left_alone() -> None:
    def main() -> dict[str, Any]:
        lr = 0.1
        held = locals()
        config = {"lr": lr}
        looked()
        return held

    assert main() == {"lr": 0.1}


def test_settling_lets_go_of_what_was_found() -> None:
    class Args(argparse.Namespace):
        pass

    found = Hyperparameters()

    def main() -> weakref.ref[Any]:
        args = Args(lr=0.1, api_key="plainword")
        found.look(sys._getframe())
        return weakref.ref(args)

    gone = main()
    found.settle()
    gc.collect()
    assert gone() is None
    assert found.found()["argparse"] == {"lr": 0.1, "api_key": "[redacted]"}


def test_hostile_objects_are_not_touched() -> None:
    class Hostile:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    def main() -> dict[str, Any]:
        config = Hostile()  # noqa: F841
        return looked().found()

    assert "config" not in main()


def test_a_lazy_value_of_a_configuration_is_not_made_to_do_its_work() -> None:
    class Lazy:
        """As proxies have it: their class is that of what they stand for, which is loaded for that."""

        @property
        def __class__(self) -> type:  # type: ignore[override]
            done.append(self)
            return int

    done: list[Any] = []

    def training() -> dict[str, Any]:
        config = {"lr": 0.5, "epochs": 2, "data": Lazy()}  # noqa: F841
        return looked().found()

    assert training() == {"config": {"lr": 0.5, "epochs": 2}}
    assert not done


def test_scripts_are_told_from_libraries() -> None:
    assert is_script("/home/me/train.py")
    assert is_script("train.py")
    assert not is_script(torch.__file__)
    assert not is_script(argparse.__file__)
    assert not is_script(hyperparameters.__file__)
    assert not is_script("<frozen importlib._bootstrap>")


class CFG:
    lr = 1e-3
    layers = (1, 2)

    def build(self) -> None: ...


class Baseline(CFG):
    epochs = 3

    def __init__(self) -> None:
        self.lr = 0.5
        self._private = 1


class Fields(NamedTuple):
    lr: float = 0.5


class Kind(enum.Enum):
    ADAM = "adam"


class Attributes(dict):  # type: ignore[type-arg]
    """As EasyDict, Munch and yacs have it."""


def test_a_class_of_constants_and_an_object_of_one_are_configuration() -> None:
    def training() -> dict[str, Any]:  # without an assert, for which pytest has a function read its own variables
        cfg, config = CFG, Baseline()  # noqa: F841
        return looked().found()

    found = training()
    assert redacted(found["cfg"]) == {"lr": 1e-3, "layers": [1, 2]}
    assert redacted(found["config"]) == {"lr": 0.5, "layers": [1, 2], "epochs": 3}


def test_fields_attributes_and_values_of_other_types_are_configuration() -> None:
    def training() -> dict[str, Any]:
        args, opts = Fields(), Attributes(lr=0.5)  # noqa: F841
        config = {"kind": Kind.ADAM, "dtype": torch.bfloat16, "seed": numpy.int64(3), "schedule": math.sqrt, 1: 2}  # noqa: F841
        hparams = {"lr": 0.5, "seed": 1, "weights": torch.ones(3)}  # noqa: F841
        return looked().found()

    found = {name: redacted(value) for name, value in training().items()}
    assert found["args"] == found["opts"] == {"lr": 0.5}
    assert found["config"] == {"kind": "adam", "dtype": "torch.bfloat16", "seed": 3, "1": 2}
    assert found["hparams"] == {"lr": 0.5, "seed": 1}


def test_parameters_and_optimizers_are_no_configuration_whatever_they_are_called() -> None:
    class Own(torch.optim.SGD): ...

    def training() -> dict[str, Any]:
        params = {"weight": torch.ones(3), "bias": torch.ones(3)}  # noqa: F841
        opt = Own([torch.nn.Parameter(torch.ones(3))], lr=0.5)  # noqa: F841
        config = {"lr": 0.5}  # noqa: F841
        return looked().found()

    assert training() == {"config": {"lr": 0.5}}


def test_options_of_click_are_found_in_the_command_that_is_executed() -> None:
    click = pytest.importorskip("click")
    found: dict[str, Any] = {}

    @click.command()  # type: ignore[untyped-decorator]
    @click.option("--lr", default=0.5)  # type: ignore[untyped-decorator]
    @click.option("--api-key", default="hunter2secret")  # type: ignore[untyped-decorator]
    def main(lr: float, api_key: str) -> None:
        found.update(looked().found())

    main([], standalone_mode=False)
    assert redacted(found["click"]) == {"lr": 0.5, "api_key": "[redacted]"}


def test_flags_of_absl_are_found_without_those_of_its_own_modules() -> None:
    def training() -> dict[str, Any]:
        flags = type("FlagValues", (), {"__module__": "absl.flags._flagvalues"})()
        lr, own = (SimpleNamespace(name=name, _value=value) for name, value in (("lr", 0.5), ("verbosity", 0)))
        flags.__dict__["__flags_by_module"] = {"train.py": [lr], "absl.logging": [own]}
        return looked().found()

    assert training() == {"absl": {"lr": 0.5}}
