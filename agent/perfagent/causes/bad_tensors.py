"""Which of some named tensors hold NaN or infinity: counted on their device, in one pass, and read when it has arrived."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from perfagent.causes.batch import can_be_counted
from perfagent.causes.culprit import SHOWN, in_order
from perfagent.device import Reading, read_later
from perfagent.measure.sharding import local as local_part
from perfagent.measure.tensor_storage import is_lazy, made_of
from perfagent.wire.evidence import BadTensor, BadTensors

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BadAmong"]


class BadAmong:
    """The largest magnitude of each tensor, perhaps not read yet. used: those that have gradients, by id(), if known."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], used: set[int] | None = None) -> None:
        torch = sys.modules["torch"]
        groups: dict[tuple[Any, Any], list[tuple[str, Tensor]]] = {}
        self._places: dict[str, int] = {}
        self.trained: list[str] = []
        for name, tensor in named:
            for part in _counted(tensor):
                groups.setdefault((part.device, part.dtype), []).append((name, part))
                self._places.setdefault(name, len(self._places))
            if name in self._places and tensor.requires_grad and (used is None or id(tensor) in used):
                self.trained.append(name)
        self._readings: list[tuple[list[tuple[str, Tensor | None]], Reading]] = []
        for same in groups.values():
            with torch.no_grad():
                largest = torch.stack(torch._foreach_norm([tensor for _, tensor in same], float("inf")))
                # 1e39 is no inf there
                reading = read_later(largest if largest.dtype == torch.float64 else largest.float())
            if reading is not None:  # a tensor on a device must not be kept for its name
                self._readings.append(([(name, one if one.is_cpu else None) for name, one in same], reading))
        self._bad: dict[str, BadTensor] = {}
        if self.ready():
            self._settle()  # before the optimizer changes what lies on the CPU

    def ready(self) -> bool:
        """Never blocks."""
        return all(reading.ready() for _, reading in self._readings)

    def _settle(self) -> None:
        torch = sys.modules["torch"]
        for named, reading in self._readings:
            for (name, tensor), largest in zip(named, reading.values(), strict=True):
                if math.isfinite(largest) or name in self._bad:  # one with several parts is one
                    continue
                entry = self._bad[name] = {"name": name}
                if tensor is not None and len(self._bad) <= SHOWN:
                    bad = int((~torch.isfinite(tensor)).sum())
                    entry |= {
                        "nonfinite": bad, "share": bad / tensor.numel(), "dtype": str(tensor.dtype).removeprefix("torch."),
                        "shape": [*tensor.shape],
                    }  # fmt: skip
        self._readings = []

    def __bool__(self) -> bool:
        """Whether there was anything to look at."""
        return bool(self._places)

    def shown(self) -> BadTensors:
        """Once ready."""
        self._settle()
        bad = sorted(
            self._bad.values(), key=lambda entry: self._places[entry["name"]]
        )  # they were read by device and type
        found = in_order(bad, self.trained, len(self._places))
        if len(bad) > 1 and self.trained and set(self.trained) <= set(self._bad):
            found["spread"] = True
        return found

    def bad_and_trained(self) -> list[str]:
        """Names; once ready."""
        return [name for name in self.trained if name in self._bad]


def _counted(tensor: Tensor) -> Iterator[Tensor]:
    """What can be counted in a parameter or gradient: our part of a sharded one; the scales of one with codes."""
    whole = tensor if is_lazy(tensor) else local_part(tensor)
    # operators on the one that is excepted wait for the collective that fills it
    for part in (
        [whole] if type(whole).__name__ == "AsyncCollectiveTensor" else [] if is_lazy(tensor) else made_of(whole)
    ):
        local = part.detach().coalesce().values() if part.is_sparse else part.detach()
        if local.numel() and can_be_counted(local):
            yield local
