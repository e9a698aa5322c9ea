"""Looks into the batches of the training's loaders: which came before, how much of them is padding, and mistakes in
their numbers.

Only tensors in host memory are read, and nothing is copied to or from a device. Every batch gets a fingerprint
(repeats.py; 6 to 10 µs with warm caches), every tenth is looked into (values.py; 90 to 280 µs), as long as both stay
within a fifth of the agent's budget: after 32 batches, the next ones are passed over until that is so. Loaders that no
step follows, such as those of evaluations, do not count.
"""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.boundary.dynamo import untraced
from perfagent.boundary.guard import guarded
from perfagent.measure.batches.padding import pad_id_of
from perfagent.measure.batches.places import Place, places_in
from perfagent.measure.batches.repeats import Fingerprint, Repeats, variety_of
from perfagent.measure.batches.values import BatchValues, Summary
from perfagent.step.state import now

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from perfagent.step.state import StepState

__all__ = ["NO_LOADER", "Contents"]

_BURST = 32
"""Batches that are looked at one after another, so that repeats at a short distance are among them."""
_LOOKED_INTO = 10
_SHARE_OF_BUDGET = 0.2
_FIRST_NS = 50_000
"""Most that the first fingerprint may count for."""
_MOST_REST = 10_000
_REPORT_NS = 2 * 10**9
"""Between two reports."""
_FINGERPRINTED = 2
_MOST_EPOCHS = 4
NO_LOADER = 0
_ONLY_IF_EVER = frozenset(("batch/ignored_pct", "batch/constant_pct"))
"""Series that begin when they are above zero for the first time: most loops never have any of it."""


class _Plan(NamedTuple):
    """How to look at batches of one structure. rows: of one."""

    fingerprint: Fingerprint
    rows: int
    values: BatchValues


@dataclass(eq=False, slots=True)
class _Epoch:
    """One iteration of a loader. plan: how to look at its batches. trains: steps follow them. begun_at: batches fetched
    before it; None once it has ended, so that the loader's next iteration is another epoch."""

    plan: _Plan | None = None
    trains: bool = False
    repeats: Repeats = field(default_factory=Repeats)
    summary: Summary = field(default_factory=Summary)
    begun_at: int | None = None


class Contents:
    """The batches of one run."""

    def __init__(self, p: StepState) -> None:
        self._progress = p
        self._epochs: dict[int, _Epoch] = {}  # by the number of the iteration
        self._of_loaders: weakref.WeakKeyDictionary[DataLoader[Any], _Epoch] = weakref.WeakKeyDictionary()
        self._total = Summary()  # of epochs that are over, for the next report
        self._has_loader = False
        self._latest: _Epoch | None = None
        self._newest: _Epoch | None = None  # that trains
        self._at = -1  # `completed` at the newest look
        self._classes: set[float] = set()
        self._pad_of: weakref.ref[nn.Module] | None = None
        self._pad_id: int | None = None
        self._looked = self._reported = 0
        self._report_at = now() + _REPORT_NS
        self._number = 0  # of batches, those passed over included
        self._rest = 0  # batches to pass over
        self._burst_ns = self._spent_ns = 0  # when the burst began, and what it has taken
        self._repeats = 0  # of epochs that are over
        self._shown: set[str] = set()
        self._usual_ns = _FIRST_NS

    @untraced
    def inspect(self, iteration: int, batch: object) -> None:
        """The loop is about to get this batch. iteration: the number of the loader's iteration; NO_LOADER for what the
        model is called with, which is the batch, of no epoch, where there is no loader."""
        if iteration == NO_LOADER and self._has_loader:
            return
        if self._rest:
            self._rest -= 1
        else:
            self._inspect(iteration, batch)

    @guarded
    def _inspect(self, iteration: int, batch: object) -> None:
        if now() >= self._report_at:
            self.report()
        self._looked += 1
        is_whole = self._looked % _LOOKED_INTO == 1
        clock = time.thread_time_ns if is_whole else now  # 2 µs: too much for each
        began = clock()
        self._burst_ns = self._burst_ns or now()
        epoch = self._epochs.get(iteration) or self._begin(iteration)
        if self._progress.completed != self._at:
            self._stepped()
        self._latest, self._at = epoch, self._progress.completed
        self._number += 1
        try:
            self._look_at(epoch, batch, is_whole=is_whole, has_epoch=iteration != NO_LOADER)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            epoch.plan = None  # another structure, or tensors that have none of what was asked
        cost = clock() - began
        if not is_whole:
            self._usual_ns = cost = min(cost, 2 * self._usual_ns)  # others may have had the processor meanwhile
        self._progress.costs.batches_ns += cost
        self._spent_ns += cost
        if self._looked % _BURST == 0:
            self._pace()

    def _look_at(self, epoch: _Epoch, batch: object, *, is_whole: bool, has_epoch: bool) -> None:
        if epoch.plan is None:
            plain = [place for place in places_in(batch) if _is_read(place.tensor)]
            telling = sorted(plain, key=_worth, reverse=True)[:_FINGERPRINTED]
            if not telling:
                return
            values = BatchValues(plain, self._pad, self._classes)
            epoch.plan = _Plan(Fingerprint(telling), len(telling[0].tensor), values)
        plan = epoch.plan
        mark = plan.fingerprint.of(batch) if has_epoch else None
        if mark is not None:
            epoch.repeats.note(mark, self._number, plan.rows)
        if is_whole:
            plan.values.inspect(batch, epoch.summary)

    def _stepped(self) -> None:
        """A step followed the newest batch."""
        if self._latest is not None:
            self._latest.trains = True
            self._newest = self._latest

    def _pad(self) -> int | None:
        """Which token is padding, once the trained model is known."""
        model = self._progress.selection.model
        if model is not None and (self._pad_of is None or self._pad_of() is not model):
            self._pad_of, self._pad_id = weakref.ref(model), pad_id_of(model)
        return self._pad_id

    def _pace(self) -> None:
        """Ends a burst: passes over so many batches that the looks stay within their share of the time."""
        took, spent = now() - self._burst_ns, self._spent_ns
        self._burst_ns = self._spent_ns = 0
        lacking = spent / (_SHARE_OF_BUDGET * self._progress.links.governor.budget) - took
        if lacking > 0 and took > 0:
            self._rest = min(_MOST_REST, int(lacking * _BURST / took))
            self._number += self._rest

    def begun(self, loader: DataLoader[Any], iteration: int) -> None:
        """A DataLoader begins an iteration."""
        before, fetched = self._of_loaders.get(loader), self._number - self._rest
        if before is not None and before.begun_at is not None and fetched - before.begun_at <= 1:  # for each batch
            self._epochs = {key: one for key, one in self._epochs.items() if one is not before}
        else:
            before = _Epoch(None if before is None else before.plan)
        if iteration in self._epochs:
            self._over(self._epochs.pop(iteration))
        self._of_loaders[loader] = self._begin(iteration, before)
        before.begun_at = fetched

    def ended(self, iteration: int) -> None:
        """The loader has no more batches in this epoch."""
        epoch = self._epochs.pop(iteration, None)
        if epoch is None:
            return
        if epoch is self._latest and self._progress.completed != self._at:
            self._stepped()
        epoch.repeats.end()
        epoch.begun_at = None
        self._over(epoch)

    def _begin(self, iteration: int, epoch: _Epoch | None = None) -> _Epoch:
        if len(self._epochs) >= _MOST_EPOCHS:
            self._over(self._epochs.pop(next(iter(self._epochs))))
        self._has_loader = self._has_loader or iteration != NO_LOADER
        return self._epochs.setdefault(iteration, epoch or _Epoch())

    def _over(self, epoch: _Epoch) -> None:
        if epoch.trains:
            self._repeats += epoch.repeats.count
            self._total.take(epoch.summary)
        epoch.repeats.count, epoch.summary = 0, Summary()

    @guarded
    def report(self) -> None:
        """Appends a row of what was seen since the last report. Also at the end of the run."""
        self._report_at = now() + _REPORT_NS
        p, values = self._progress, self._series() if self._looked > self._reported else {}
        self._reported = self._looked
        if values:
            p.rows.append((p.logged_at(), time.time(), time.monotonic(), tuple(values), tuple(values.values())))

    def _series(self) -> dict[str, float]:
        if self._progress.completed != self._at:
            self._stepped()
        total, self._total, repeats = self._total, Summary(), self._repeats
        for epoch in self._epochs.values():
            if epoch.trains:
                repeats += epoch.repeats.count
                total.take(epoch.summary)
                epoch.summary = Summary()
        values = total.series()
        if len(self._classes) < 2:
            values.pop("batch/one_class_pct", None)
        if self._newest is not None and self._newest.repeats.distinct:
            values["batch/repeats"] = float(repeats)
            if repeats:
                values["batch/distinct"] = float(self._newest.repeats.distinct)
        self._shown.update(name for name, value in values.items() if value)
        return {name: value for name, value in values.items() if name in self._shown or name not in _ONLY_IF_EVER}


def _is_read(tensor: Tensor) -> bool:
    """Whether it is a plain tensor in host memory, with rows."""
    torch = sys.modules["torch"]
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.is_cpu and tensor.dim() > 0


def _worth(place: Place) -> tuple[int, int]:
    """How much a tensor tells of a batch."""
    return 0 if place.tensor.is_complex() else variety_of(place.tensor), place.tensor.numel()
