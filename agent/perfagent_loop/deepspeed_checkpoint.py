"""The part of a checkpoint that a DeepSpeed engine writes and reads itself, by `save_checkpoint` and `load_checkpoint`.

DeepSpeed unpickles its files without restraint; here they are read with weights_only=True and a short list of
DeepSpeed's own classes, so that a file from elsewhere cannot run code. Both calls are collectives of all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from perfagent.errors import CheckpointError

__all__ = ["reader", "writer"]

TAG = "engine"


def writer(engine: Any) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    return save


def reader(engine: Any) -> Callable[[Path], None]:
    def load(folder: Path) -> None:
        with _weights_only(engine.checkpoint_engine):
            path, _ = engine.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise CheckpointError(
                f"{folder} is whole, but DeepSpeed finds nothing for this engine in it: another ZeRO stage or world size?"
            )

    return load


@contextlib.contextmanager
def _weights_only(files: Any) -> Iterator[None]:
    """Has DeepSpeed's engine for files load as we do."""

    def load(path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(_own_classes()):
            return torch.load(path, map_location=map_location, weights_only=True)

    files.load = load  # on the object, over its class's method
    try:
        yield
    finally:
        del files.load


def _own_classes() -> list[Any]:
    """Classes that DeepSpeed's own files hold: data without code."""
    scalers = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    zero = importlib.import_module("deepspeed.runtime.zero.config")
    fragments = importlib.import_module("deepspeed.utils.tensor_fragment")
    return [scalers.DynamicLossScaler, scalers.LossScaler, zero.ZeroStageEnum, fragments.fragment_address]
