"""Looks into the batches of the training's loaders: which came before, how much of them is padding, and mistakes in
their numbers.

Only tensors in host memory are read, and nothing is copied to or from a device. Every batch gets a fingerprint
(batch_fingerprint.py), every tenth is looked into (batch_padding.py, batch_values.py), as long as both stay within a
fifth of the agent's budget: after 32 batches, the next ones are passed over until that is so. Measured with everything
around it: a fingerprint takes 6 to 10 µs with warm caches and 30 to 50 in trainings on a machine that others used, too;
a look 90 to 280 µs, the first one of a structure 0.5 ms.

A batch counts as repeated if the one before was the same, or if another batch of the same epoch was. An epoch is one
iteration of a loader. In a loader without an end, batches that come again at a constant distance are its next pass over
the data; those that come again at any distance count only once the iteration has ended. A loader that is begun for each
batch (`next(iter(loader))`) goes on with its epoch. Loaders that no step follows, such as those of evaluations, do not
count.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import TYPE_CHECKING, Any

from perfagent.boundary.dynamo import untraced
from perfagent.boundary.guard import failed
from perfagent.signals.batch_fingerprint import Fingerprint, informative, sampled
from perfagent.signals.batch_padding import Count, pad_id_of, padding_of
from perfagent.signals.batch_tensors import Place, places_in, reached
from perfagent.signals.batch_values import BatchValues, Summary
from perfagent.step.state import now

if TYPE_CHECKING:
    from perfagent.step.state import StepState

__all__ = ["Contents"]

_BURST = 32
"""Batches that are looked at one after another, so that repeats at a short distance are among them."""
_LOOKED_INTO = 10
_SHARE_OF_BUDGET = 0.2
_FIRST_NS = 50_000
"""Most that the first fingerprint may count for."""
_MOST_REST = 10_000
_MARKS = 2
_MOST_LOADERS = 4
_NEVER = -2
_NO_LOADER = 0
_MOST_KNOWN = 2**15
"""Most fingerprints of an epoch (3 MB); then they are forgotten."""
_PASS = 3
"""So many repeats in a row at one distance are a new pass over the data."""
_ONLY_IF_EVER = frozenset(("batch/ignored_pct", "batch/constant_pct"))
"""Series that begin when they are above zero for the first time: most loops never have any of it."""


class _Epoch:
    """One iteration of a loader.

    trains: steps follow its batches. known: fingerprint -> number of the batch that had it last. again: batches that
    the one before was the same as. maybe: those that came before at a distance, which count when the iteration ends.
    distance: of the newest of them, and how many in a row had it.
    """

    __slots__ = ("again", "begun_at", "distance", "known", "maybe", "of", "plan", "summary", "trains")

    def __init__(self) -> None:
        self.trains = False
        self.known: dict[int, int] = {}
        self.again = self.maybe = 0
        self.distance = 0, 0
        self.summary = Summary()
        self.plan: _Plan | None = None
        self.of: Any = None  # weak reference to the loader, if it was begun before our eyes
        self.begun_at = 0

    def note(self, mark: int, number: int, rows: int) -> None:
        before = self.known.get(mark)
        if before is None and len(self.known) >= _MOST_KNOWN:
            self.known.clear()
        self.known[mark] = number
        if before is None:
            self.distance = 0, 0
            return
        distance = number - before
        if distance == 1:
            self.again += 1
        elif rows > 1:  # samples one by one may be drawn twice
            last, count = self.distance
            self.distance = distance, count + 1 if distance == last else 1
            self.maybe += 1
            if self.distance[1] >= _PASS:
                self.maybe, self.distance = 0, (0, 0)
                self.known = {mark: number}


class _Plan:
    """How to look at batches of one structure. is_empty: the batch has no tensors in host memory."""

    __slots__ = ("_dtypes", "fingerprint", "is_empty", "padding", "rows", "values")

    def __init__(self, places: list[Place], pad_id: int | None, classes: set[float]) -> None:
        ranked = sorted(places, key=_worth, reverse=True)[:_MARKS]
        self.is_empty = not ranked
        self.fingerprint = Fingerprint([(place.path, place.tensor) for place in ranked])
        self.rows = len(ranked[0].tensor) if ranked else 0
        self._dtypes = [(place.tensor.dtype, place.tensor.dim()) for place in ranked]
        self.padding: Count | None = padding_of(places, pad_id)
        self.values = BatchValues(places, classes)

    def fits(self, batch: Any) -> bool:
        try:
            tensors = [reached(batch, path) for path in self.fingerprint.paths]
            return [(tensor.dtype, tensor.dim()) for tensor in tensors] == self._dtypes
        except (AttributeError, LookupError, TypeError):
            return False


class Contents:
    """The batches of one run. cost_ns: what looking at them has taken of the training thread so far."""

    __slots__ = (
        "_at", "_burst", "_classes", "_ended", "_epochs", "_has_loader", "_latest", "_looked", "_newest", "_number",
        "_of_loaders", "_pad_id", "_pad_of", "_plan", "_progress", "_repeats", "_reported", "_rest", "_shown", "_spent",
        "_usual_ns", "cost_ns",
    )  # fmt: skip

    def __init__(self, p: StepState) -> None:
        self._progress = p
        self._epochs: dict[int, _Epoch] = {}  # by the number of the iteration
        self._of_loaders: dict[int, _Epoch] = {}  # id of a DataLoader -> its newest epoch
        self._ended: list[Summary] = []  # of epochs that are over, for the next report
        self._has_loader = False
        self._latest: _Epoch | None = None
        self._newest: _Epoch | None = None  # that trains
        self._at = -1  # `completed` at the newest look
        self._plan: _Plan | None = None  # the newest
        self._classes: set[float] = set()
        self._pad_of: Any = None
        self._pad_id: int | None = None
        self._looked = 0
        self._number = 0  # of batches, those passed over included
        self._rest = 0  # batches to pass over
        self._burst = self._spent = 0  # when the burst began, and what it has taken, ns
        self._repeats = 0  # of epochs that are over
        self._reported = 0
        self._shown: set[str] = set()
        self._usual_ns = _FIRST_NS
        self.cost_ns = 0

    # ---- on the training thread

    @untraced
    def look(self, iteration: int, batch: Any) -> None:
        """The loop is about to get this batch. iteration: the number of the loader's iteration."""
        if self._rest:
            self._rest -= 1
            return
        try:
            began = now()
            if self._looked % _LOOKED_INTO:
                self._look(iteration, batch, began)
                self._usual_ns = min(now() - began, 2 * self._usual_ns)  # others may have had the processor meanwhile
                cost = self._usual_ns
            else:
                spent = time.thread_time_ns()  # 2 µs: too much for each
                self._look(iteration, batch, began)
                cost = time.thread_time_ns() - spent
            self.cost_ns += cost
            self._spent += cost
        except Exception as error:  # noqa: BLE001 - it must not reach the training loop
            self._rest = sys.maxsize
            failed(_NAME, error)

    @untraced
    def look_at_call(self, inputs: Any) -> None:
        """The model is called for training with these inputs, and nothing was fetched before: where there is no loader,
        they are the batch, of no epoch."""
        if not self._has_loader:
            self.look(_NO_LOADER, inputs)

    def _look(self, iteration: int, batch: Any, began: int) -> None:
        epoch = self._epochs.get(iteration) or self._begin(iteration)
        completed = self._progress.completed
        if completed != self._at:
            self._stepped()
        self._latest, self._at = epoch, completed
        self._number += 1
        self._looked += 1
        self._burst = self._burst or began
        try:
            plan = epoch.plan or self._planned(epoch, batch)
            if not plan.is_empty:
                self._look_at(iteration, batch, epoch, plan)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            epoch.plan = None  # another structure, or tensors that have none of what was asked
        if self._looked % _BURST == 0:
            self._pace(began)

    def _look_at(self, iteration: int, batch: Any, epoch: _Epoch, plan: _Plan) -> None:
        if iteration != _NO_LOADER:
            mark = plan.fingerprint.of(batch)
            if mark is not None:
                epoch.note(mark, self._number, plan.rows)
        if self._looked % _LOOKED_INTO == 1:
            self._look_into(batch, epoch, plan)

    def _look_into(self, batch: Any, epoch: _Epoch, plan: _Plan) -> None:
        summary = epoch.summary
        with sys.modules["torch"].no_grad():
            plan.values.look(batch, summary)
            counts = plan.padding(batch) if plan.padding is not None else None
        if counts is not None:
            summary.padding += counts[0]
            summary.places += counts[1]
        elif plan.padding is None and self._pads(self._progress.selection.found):
            epoch.plan = self._plan = None

    def _stepped(self) -> None:
        """A step followed the newest batch."""
        if self._latest is not None:
            self._latest.trains = True
            self._newest = self._latest

    def _planned(self, epoch: _Epoch, batch: Any) -> _Plan:
        if self._plan is None or self._plan.is_empty or not self._plan.fits(batch):
            self._plan = _Plan(places_in(batch), self._pad_id, self._classes)
        epoch.plan = self._plan
        return self._plan

    def _pads(self, found: Any) -> bool:
        """Whether the trained model is known now, and that one of its tokens is padding."""
        model = found() if found is not None else None
        if model is None or (self._pad_of is not None and self._pad_of() is model):
            return False
        self._pad_of, self._pad_id = found, pad_id_of(model)
        return self._pad_id is not None

    def _pace(self, began: int) -> None:
        """Ends a burst: passes over so many batches that the looks stay within their share of the time."""
        took, spent = began - self._burst, self._spent
        self._burst = self._spent = 0
        lacking = spent / (_SHARE_OF_BUDGET * self._progress.links.governor.budget) - took
        if lacking > 0 and took > 0:
            self._rest = min(_MOST_REST, int(lacking * _BURST / took))
            self._number += self._rest

    def begun(self, loader: Any, iteration: int) -> None:
        """A DataLoader begins an iteration."""
        before = self._of_loaders.get(id(loader))
        passed = self._number - self._rest
        anew = before is not None and before.of() is loader and passed - before.begun_at <= 1
        if anew and before is not None:  # for each batch
            self._epochs = {key: one for key, one in self._epochs.items() if one is not before}
        if iteration in self._epochs:
            self._over(self._epochs.pop(iteration))
        epoch = self._begin(iteration, before if anew else None)
        if len(self._of_loaders) >= _MOST_LOADERS and id(loader) not in self._of_loaders:
            del self._of_loaders[next(iter(self._of_loaders))]
        self._of_loaders[id(loader)] = epoch
        epoch.of, epoch.begun_at = weakref.ref(loader), passed

    def ended(self, iteration: int) -> None:
        """The loader has no more batches in this epoch."""
        epoch = self._epochs.pop(iteration, None)
        if epoch is None:
            return
        if epoch is self._latest and self._progress.completed != self._at:
            self._stepped()
        epoch.again += epoch.maybe
        epoch.maybe = 0
        epoch.begun_at = _NEVER  # the loader's next iteration is another epoch
        self._over(epoch)

    def _begin(self, iteration: int, epoch: _Epoch | None = None) -> _Epoch:
        if len(self._epochs) >= _MOST_LOADERS:
            self._over(self._epochs.pop(next(iter(self._epochs))))
        self._has_loader = self._has_loader or iteration != _NO_LOADER
        epoch = self._epochs[iteration] = epoch or _Epoch()
        return epoch

    def _over(self, epoch: _Epoch) -> None:
        if epoch.trains:
            self._repeats += epoch.again
            self._ended.append(epoch.summary)
        epoch.again, epoch.summary = 0, Summary()

    # ---- on the sender's thread

    def report(self) -> dict[str, float]:
        """Returns what was seen since the last report; empty if nothing was."""
        if self._looked == self._reported:
            return {}
        self._reported = self._looked
        if self._progress.completed != self._at:
            self._stepped()
        training = [one for one in [*self._epochs.values()] if one.trains]
        total, repeats = Summary(), self._repeats + sum(one.again for one in training)
        while self._ended:
            total.add(self._ended.pop())
        for epoch in training:
            summary, epoch.summary = epoch.summary, Summary()
            total.add(summary)
        values = total.series(sorted_by_class=len(self._classes) > 1)
        newest = self._newest
        if newest is not None and newest.known:
            values["batch/repeats"] = float(repeats)
            values["batch/distinct"] = float(len(newest.known))
        if not repeats:
            values.pop("batch/distinct", None)
        self._shown.update(name for name, value in values.items() if value)
        return {name: value for name, value in values.items() if name in self._shown or name not in _ONLY_IF_EVER}


_NAME = f"{__name__}.Contents"


def _worth(place: Place) -> tuple[int, int]:
    """How much a tensor tells of a batch."""
    tensor = place.tensor
    return (informative(sampled(tensor)) if not tensor.is_complex() else 0), int(tensor.numel())
