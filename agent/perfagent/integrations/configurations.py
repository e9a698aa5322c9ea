"""Classes by which libraries hold the settings of a training: known by their names, since none is imported for it."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["configuration_in", "settings_of_dataclasses"]

_CONFIGURATIONS = {
    "absl.FlagValues": ("absl", "__flags_by_module"),
    "argparse.Namespace": ("argparse", ""),
    "click.Context": ("click", "params"),
    "deepspeed.DeepSpeedEngine": ("deepspeed", "_config._param_dict"),
    "lightning.LightningModule": ("lightning", "_hparams"),
    "omegaconf.DictConfig": ("hydra", ""),
    "pytorch_lightning.LightningModule": ("lightning", "_hparams"),
    "transformers.TrainingArguments": ("huggingface", ""),
    "typer.Context": ("click", "params"),
}
"""Package and name of a class -> the source, and which attribute of an object of it is configuration ("": all of it)."""


def configuration_in(value: object, kind: type) -> tuple[str, Any] | None:
    """Source and settings where this class, one of the value's, is one of a library's for settings."""
    source, path = _CONFIGURATIONS.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}", ("", ""))
    for attribute in path.split(".") if path else ():
        value = _attribute(value, attribute)
    return (source, _flags(value) if source == "absl" else value) if source else None


def _attribute(value: object, name: str) -> object:
    own = getattr(value, "__dict__", None)
    return own.get(name) if isinstance(own, dict) else None


def _flags(by_module: object) -> dict[str, object] | None:
    """What absl parsed of the script's flags; those of its own modules are left out."""
    if not isinstance(by_module, dict):
        return None
    every = [flag for module, flags in list(by_module.items()) if not str(module).startswith("absl.") for flag in flags]
    return {str(_attribute(flag, "name")): _attribute(flag, "_value") for flag in every}


def settings_of_dataclasses(parser: Any, namespace: object) -> dict[str, object]:
    """Fields of the script's own dataclasses; TrainingArguments are reported elsewhere. Read before the parser empties
    the namespace."""
    trainers = [
        kind for kind in parser.dataclass_types if any(base.__name__ == "TrainingArguments" for base in kind.__mro__)
    ]
    theirs = {field.name for kind in trainers for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(namespace).items() if name not in theirs}
