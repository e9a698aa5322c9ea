"""The part of a checkpoint that a DeepSpeed engine writes and reads itself, by `save_checkpoint` and `load_checkpoint`.

DeepSpeed unpickles its files without restraint; here they are read with weights_only=True and a short list of
DeepSpeed's own classes, so that a file from elsewhere cannot run code. Both calls are collectives of all ranks.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from perfagent.errors import CheckpointError

__all__ = ["load_engine", "save_engine"]

_TAG = "engine"


def save_engine(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder), tag=_TAG, save_latest=False)


def load_engine(engine: Any, folder: Path) -> None:
    """Raises CheckpointError where the engine's files are for another one."""
    files = engine.checkpoint_engine
    files.load = _load  # on the object, over its class's method
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=_TAG)
    finally:
        del files.load
    if path is None:
        raise CheckpointError(
            f"{folder} is whole, but DeepSpeed finds nothing for this engine in it: another ZeRO stage or world size?"
        )


def _load(path: str, map_location: Any = None) -> object:
    scalers = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
    zero = importlib.import_module("deepspeed.runtime.zero.config")
    fragments = importlib.import_module("deepspeed.utils.tensor_fragment")
    own = [scalers.DynamicLossScaler, scalers.LossScaler, zero.ZeroStageEnum, fragments.fragment_address]
    with torch.serialization.safe_globals(own):
        return torch.load(path, map_location=map_location, weights_only=True)
