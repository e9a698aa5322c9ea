"""Classes by which libraries hold the settings of a training: known by their names, since none is imported for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CONFIGURATIONS", "attributes_of", "settings_of_dataclasses"]


def attributes_of(value: object) -> Mapping[str, Any]:
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


def _flags(values: object) -> dict[str, object] | None:
    """What absl parsed of the script's flags; those of its own modules are left out."""
    by_module = attributes_of(values).get("__flags_by_module")
    if not isinstance(by_module, dict):
        return None
    every = [flag for module, flags in list(by_module.items()) if not str(module).startswith("absl.") for flag in flags]
    return {str(attributes_of(flag).get("name")): attributes_of(flag).get("_value") for flag in every}


def settings_of_dataclasses(parser: Any, namespace: object) -> dict[str, object]:
    """Fields of the script's own dataclasses; TrainingArguments are reported elsewhere. Read before the parser empties
    the namespace."""
    trainers = [
        kind for kind in parser.dataclass_types if any(base.__name__ == "TrainingArguments" for base in kind.__mro__)
    ]
    theirs = {field.name for kind in trainers for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(namespace).items() if name not in theirs}


def _itself(value: object) -> object:
    return value


CONFIGURATIONS: dict[str, tuple[tuple[str, ...], str, Callable[[Any], object]]] = {
    "Namespace": (("argparse",), "argparse", _itself),
    "TrainingArguments": (("transformers",), "huggingface", _itself),
    "Context": (("click", "typer"), "click", lambda context: attributes_of(context).get("params")),
    "FlagValues": (("absl",), "absl", _flags),
    "DictConfig": (("omegaconf",), "hydra", _itself),
    "LightningModule": (
        ("lightning", "pytorch_lightning"),
        "lightning",
        lambda module: attributes_of(module).get("_hparams"),
    ),
    "DeepSpeedEngine": (
        ("deepspeed",),
        "deepspeed",
        lambda engine: attributes_of(attributes_of(engine).get("_config")).get("_param_dict"),
    ),
}
"""Name of a class -> (the packages that it may be of, the source, what of an object of it is configuration)."""
