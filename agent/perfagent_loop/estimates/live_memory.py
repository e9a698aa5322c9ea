"""Keeps account of what is alive at every moment of a simulated step, by what it is for.

Every operation below autograd passes through a dispatch mode; the storages that it makes are entered, and a weak
reference takes each out again at the moment it is freed. On fake tensors nothing is computed and nothing allocated."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from perfagent_loop.estimates.workspace import Scratch

__all__ = ["PARTS", "Account", "Moment", "Part", "Phase"]

Part = Literal["weights", "gradients", "optimizer", "inputs", "activations"]
PARTS: tuple[Part, ...] = get_args(Part)
Phase = Literal["setup", "forward", "backward", "optimizer"]

CUDA_BLOCK = 512
"""torch's CUDA allocator gives out multiples of this many bytes."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes alive just after an allocation, by part; `activations` are all tensors that are nothing else."""

    step: int
    phase: Phase
    live: tuple[int, ...]
    """In the order of PARTS."""

    @property
    def total_bytes(self) -> int:
        return sum(self.live)


class Account(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the books while it is entered. block: sizes are rounded up to multiples of it."""

    def __init__(self, *, block: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[Moment] = []
        self.step = 0
        self.phase: Phase = "setup"
        self._part: Part = "activations"
        self._block = block
        self._live = dict.fromkeys(PARTS, 0)
        self._known: dict[int, tuple[Part, int]] = {}
        self._scratch = Scratch()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = self._scratch.run(func, args, kwargs or {})
        grown = False
        for one in tree_iter(result):
            if isinstance(one, Tensor):
                grown |= self._enter(one)
        inside = self._scratch.bytes_within(func, args, result)
        if grown or inside:
            *others, rest = (self._live[part] for part in PARTS)
            self.moments.append(Moment(self.step, self.phase, (*others, rest + inside)))
        return result

    def live(self, part: Part) -> int:
        """Bytes of a part now."""
        return self._live[part]

    @contextmanager
    def making(self, part: Part) -> Iterator[None]:
        """What is allocated within belongs to this part."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def belongs(self, tensor: Tensor, part: Part) -> None:
        """A tensor turned out to be of this part, such as a gradient. A sparse one stays what its values were."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()._cdata
        entry = self._known.get(storage)
        if entry is not None and entry[0] != part:
            self._live[entry[0]] -= entry[1]
            self._live[part] += entry[1]
            self._known[storage] = (part, entry[1])

    def _enter(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return False
        size = -(-storage.nbytes() // self._block) * self._block
        self._known[key] = (self._part, size)
        self._live[self._part] += size
        weakref.finalize(storage, self._leave, key).atexit = False
        return size > 0

    def _leave(self, key: int) -> None:
        part, size = self._known.pop(key)
        self._live[part] -= size
