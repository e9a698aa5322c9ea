"""Which of some named tensors hold NaN or infinity: counted on their device, in one pass, and read when it has arrived."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from perfagent.device import Reading, collect
from perfagent.rootcause.batch import can_be_counted
from perfagent.rootcause.culprit import SHOWN
from perfagent.signals.sharding import local as local_part
from perfagent.signals.tensor_storage import is_lazy, made_of
from perfagent.wire.evidence import BadTensor, BadTensors

__all__ = ["BadAmong"]


class BadAmong:
    """Which of some named tensors hold NaN or infinity: the largest magnitude of each, in one pass, perhaps not read
    yet.

    used: those that have gradients, by id(), where that is known.
    """

    def __init__(self, named: Iterable[tuple[str, Any]], used: set[int] | None = None) -> None:
        torch = sys.modules["torch"]
        groups: dict[tuple[Any, Any], list[tuple[str, Any]]] = {}
        self.count = 0
        self._order: list[str] = []
        self.trained: list[str] = []
        for name, tensor in named:
            parts = [*_counted(tensor)]
            for part in parts:
                groups.setdefault((part.device, part.dtype), []).append((name, part))
            if parts:
                self.count += 1
                self._order.append(name)
                if tensor.requires_grad and (used is None or id(tensor) in used):
                    self.trained.append(name)
        self._readings: list[tuple[list[tuple[str, Any]], Reading]] = []
        with torch.no_grad():
            for same in groups.values():
                largest = torch.stack(torch._foreach_norm([tensor for _, tensor in same], float("inf")))
                # 1e39 is no inf there
                reading = collect(largest if largest.dtype == torch.float64 else largest.float())
                if reading is not None:
                    # weak where it matters: a tensor on a device must not be kept for its name
                    kept = [(name, tensor if tensor.is_cpu else None) for name, tensor in same]
                    self._readings.append((kept, reading))
        self._bad: list[BadTensor] | None = None
        if all(reading.ready() for _, reading in self._readings):
            self._settle()  # before the optimizer changes what lies on the CPU

    def ready(self) -> bool:
        """Never blocks."""
        return self._bad is not None or all(reading.ready() for _, reading in self._readings)

    def _settle(self) -> None:
        torch = sys.modules["torch"]
        self._bad = []
        known: set[str] = set()  # one with several parts is one
        for named, reading in self._readings:
            for (name, tensor), largest in zip(named, reading.values(), strict=True):
                if largest - largest == 0.0 or name in known:
                    continue
                known.add(name)
                entry: BadTensor = {"name": name}
                if tensor is not None and len(self._bad) < SHOWN:
                    bad = int((~torch.isfinite(tensor)).sum())
                    entry |= {
                        "nonfinite": bad, "share": bad / tensor.numel(), "dtype": str(tensor.dtype).removeprefix("torch."),
                        "shape": [int(size) for size in tensor.shape],
                    }  # fmt: skip
                self._bad.append(entry)
        self._readings = []
        places = {name: place for place, name in enumerate(self._order)}  # they were read by device and type
        self._bad.sort(key=lambda entry: places[entry["name"]])

    def __bool__(self) -> bool:
        """Whether there was anything to look at."""
        return bool(self.count)

    def shown(self) -> BadTensors:
        """Once ready."""
        if self._bad is None:
            self._settle()
        assert self._bad is not None
        names = [entry["name"] for entry in self._bad]
        found: BadTensors = {
            "of": self.count, "nonfinite": len(names), "first": self._bad[:SHOWN], "last": names[-1] if names else None,
        }  # fmt: skip
        if len(names) > 1 and self.trained and set(self.trained) <= set(names):
            found["spread"] = True
        # the order of the model mostly is that of its forward pass: so it is when a gradient becomes NaN on its way back
        follows = self.trained[len(names) : len(names) + 1]
        if follows and len(names) > 1 and names == self.trained[: len(names)]:
            found["good_from"] = follows[0]
        return found

    def bad_and_trained(self) -> list[str]:
        """Names; once ready."""
        bad = {entry["name"] for entry in self._bad or ()}
        return [name for name in self.trained if name in bad]


def _counted(tensor: Any) -> Iterator[Any]:
    """What can be counted in a parameter or gradient: our part of a sharded one; of one with codes and scales the
    scales."""
    if is_lazy(tensor):
        return
    whole = local_part(tensor)
    # operators on the one that is excepted wait for the collective that fills it
    parts = [whole] if type(whole).__name__ == "AsyncCollectiveTensor" else made_of(whole)
    for part in parts:
        local = (
            part.detach() if part.layout is not sys.modules["torch"].sparse_coo else part.detach().coalesce().values()
        )
        if local.numel() and can_be_counted(local):
            yield local
