"""Names for values whose type only the user's code, or a library without types, knows."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Batch", "Engine", "Loader", "State"]

Batch: TypeAlias = Any  # what a loader gives: a tensor, or containers of tensors
Loader: TypeAlias = Any  # a DataLoader, or another iterable of batches
Engine: TypeAlias = Any  # DeepSpeed's
State: TypeAlias = dict[str, Any]  # what a state_dict() gives: tensors, numbers, text and containers of them, by name
