"""Takes a state as it can be written: checked for what could not be loaded again, copied to the CPU.

Loading is done with `weights_only=True`, which rebuilds tensors, numbers, text and containers of them and nothing else.
A state that holds more is refused when it is saved, by its place, and not when it is needed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perfagent.errors import ConfigError
from perfagent_loop.kinds import State
from perfagent_loop.strategies import local_piece

__all__ = ["Copier", "bytes_of", "check_loadable", "find_nan", "has_shards", "tensors_in"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)  # MultiStepLR counts its milestones


def check_loadable(state: Any, at: str = "state") -> None:
    """Raises ConfigError, naming the place, for a value that weights_only=True could not load again."""
    kind = type(state)
    if kind in _PLAIN or isinstance(state, Tensor):
        return
    if kind in _MAPPINGS:
        for key, value in state.items():
            if type(key) not in (str, int, bool, float, tuple):
                raise ConfigError(f"{at} has a key {key!r:.60} of type {type(key).__name__}; use text or numbers")
            check_loadable(value, f"{at}[{key!r}]")
    elif kind in (list, tuple, set):
        for number, value in enumerate(state):
            check_loadable(value, f"{at}[{number}]")
    else:
        raise ConfigError(
            f"{at} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: loading it would run code. "
            "Allowed are tensors, numbers, text, bytes, None, and dicts, lists, tuples and sets of them; torch.as_tensor(array) "
            "stands for an array, state_dict() for an object"
        )


def tensors_in(state: Any, at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a nested state, with its place."""
    if isinstance(state, Tensor):
        yield at, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors_in(value, f"{at}.{key}" if at else str(key))
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from tensors_in(value, f"{at}.{number}" if at else str(number))


def has_shards(state: Any) -> bool:
    """Whether any tensor of the state is sharded over ranks (a DTensor)."""
    return any(hasattr(tensor, "device_mesh") for _, tensor in tensors_in(state))


def bytes_of(state: Any) -> int:
    """Bytes of all tensors; of a sharded one this rank's piece. One that stands in several places counts once."""
    seen: dict[tuple[int, int], int] = {}
    for _, tensor in tensors_in(state):
        piece = local_piece(tensor)
        seen[piece.data_ptr(), piece.numel()] = piece.numel() * piece.element_size()
    return sum(seen.values())


def find_nan(state: Any) -> str | None:
    """The place of a tensor that holds NaN; None when there is none. Infinities may be meant (masks)."""
    for place, tensor in tensors_in(state):
        piece = local_piece(tensor)
        # The sum is NaN when a number is, and needs no tensor of truth values; it is NaN of +Inf and -Inf too: look
        # closer.
        if piece.is_floating_point() and bool(piece.sum().isnan()) and bool(piece.isnan().any()):
            return place
    return None


class Copier:
    """Copies states to the CPU, into the same memory each time: the second copy of a state is faster than the first.

    It keeps as much host memory as a state has bytes, pinned on a machine with GPUs. The next copy overwrites it."""

    def __init__(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        on_gpu = torch.cuda.is_available()
        options = StagingOptions(on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu)
        self._stager = DefaultStager(options)

    def copy(self, state: State) -> State:
        """The same state on the CPU; what shared memory shares it again. Waits for the device."""
        copied: Any = self._stager.stage(state)
        return copied  # type: ignore[no-any-return]

    def close(self) -> None:
        self._stager.close()
