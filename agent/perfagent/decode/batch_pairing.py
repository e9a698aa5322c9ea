"""Finds which batches a step consumed, and so how many samples and tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from perfagent.decode.breakdown import Breakdown, Size
from perfagent.step.trace import BACKWARD, CLEARED, DATA, OPTIMIZER_END, Entry

__all__ = ["Batches"]

_MOST_BATCHES = 256
"""Batches of one loader that may wait for a backward pass (those of an evaluation loader never get one)."""
_MOST_LOADERS = 8
_NONE_WAIT: deque[Size] = deque()
_WHOLE = 8
"""After so many batches in a row with a single step each, `parted` ends."""


class Batches:
    """Pairs batches with backward passes, first in, first out, per loader, since a framework may fetch several ahead. A
    loader whose batches are followed by no backward pass (evaluation) adds nothing. If a loop takes from several loaders
    before each backward pass, their batches count together.

    The caller passes the entries of a step's trace in order, from `begin` to `end`.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Size]] = {}
        self._loader = 0
        self._fed: set[int] = set()  # loaders that had a batch followed by a backward pass
        self._over: set[int] = set()  # loaders that are at their end
        self._fetched: dict[int, int] = {}  # loader -> batches since the last backward pass
        self._several: dict[int, int] = {}  # the same before that pass, if it had batches of several loaders
        self._evaluated = 0  # the loader whose last batch went to a model without gradients
        self._begins = False  # the next batch is the first of its loader
        self._ahead: int | None = None  # how many batches usually wait after a step
        self._fetches_in_bursts = False
        self.parted = False
        """A batch is split over several steps (a long sequence): the model's calls then show what a step consumed."""
        self._whole = 0  # batches in a row that each had a single step
        self.feeding = 0
        """id of the loader whose batches are followed by backward passes; 0 where an evaluation may get the same id."""
        self._ends = 0  # how many times such a loader has reached its end
        self.epoch = 0
        """Epoch, from 1, of the batch of the newest backward pass."""
        self.begin([])

    # ---- a step, in the order of its trace

    def begin(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._fetches = self._passes = 0
        self._repeated: set[int] | None = None
        self._again = 0  # in loops without a loader, passes on a batch that seems to have had one before

    def fetched(self, loader: int, size: Size) -> None:
        self._fetches += 1
        self._loader = loader
        for other in self._over - self._fed:  # its only batch was not for training
            self._over.discard(other)
            self._waiting.pop(other, None)
            self._fetched.pop(other, None)
        if self._begins or loader in self._over:  # a new loader may have the id of one that is gone
            if loader in self._waiting and loader not in self._over:
                self._waiting[loader].clear()  # the loop stopped before the loader's end
            self._begins = False
            self._fed.discard(loader)
            self._over.discard(loader)
        waiting = self._waiting.get(loader)
        if waiting is None:
            if len(self._waiting) >= _MOST_LOADERS:
                del self._waiting[next(iter(self._waiting))]
            self._fed &= self._waiting.keys()
            waiting = self._waiting[loader] = deque(maxlen=_MOST_BATCHES)
        waiting.append(size)
        if self._evaluated not in (0, loader):
            self._fetched.pop(self._evaluated, None)  # its batches were for an evaluation
            self._evaluated = 0
        self._fetched[loader] = self._fetched.get(loader, 0) + 1

    def turn(self, loader: int) -> None:
        """A loader has ended, or (0) another one begins. Drops the batches of loaders that never fed a backward pass."""
        self._ahead = None
        if not loader:
            self._begins = True
            for one in [one for one in self._waiting if one not in self._fed and one not in self._fetched]:
                del self._waiting[one]
        elif loader in self._fed or self._fetched == {loader: 1}:  # of one batch, its end is prefetched
            self._ends += loader in self._fed - self._over
            self._over.add(loader)  # its prefetched batches are still to come
        else:
            self._waiting.pop(loader, None)
            self._fetched.pop(loader, None)
            self._loader = next(reversed(self._fetched), self._loader)  # an earlier batch of another loader still waits

    def asked(self, *, graded: bool) -> None:
        """A model was called. graded: the root, with gradients."""
        self._evaluated = self._loader if self._fetched and not graded else 0

    def backward(self, place: int, size: Size | None, calls: int, step: Breakdown, *, in_closure: bool) -> None:
        """A backward pass began at this place in the trace. size, calls: of the model's calls before it."""
        if self._repeated is None:
            self._repeated = _repeated(self._entries)
        if place in self._repeated:
            if self._fed:
                return
            if not in_closure and step.has_size:  # a closure uses its batch again each time it is called
                self._again += size is not None
                size = None
        if not self._passes:
            self._skip(self._entries[place])
        self._passes += 1
        batch = self._oldest()
        if batch is not None:
            step.batches += 1
        part = None if self._fetches and not self.parted else size
        self._see_parts(batch)
        several = bool(self._several)
        if self._fetched or several:
            self._take_others(step)
        if batch is None or (not several and _is_part(part, batch)):
            step.take(part)
        else:
            step.take(_with_tokens(batch, size) if not several and calls == 1 else batch)

    def end(self, step: Breakdown) -> None:
        if self._again > 1:  # each pass may have had its own batch: five for a critic, one for its generator
            step.samples = step.tokens = step.embedded_tokens = 0
        self._entries = ()

    # ---- what it learns about the loop

    def took_alone(self, loader: int | None) -> bool:
        """Notes a step of one batch and one backward pass; False if it changes what is known of the loop. loader: None if
        no batch was fetched."""
        if loader is None:
            return not self._waiting
        known = loader in self._fed and loader not in self._over and self._waiting.get(loader) == _NONE_WAIT
        if not known or self.parted or self._begins or self._fetched or self._several or not self._over <= self._fed:
            return False
        self._loader, self._ahead = loader, 0
        self._feeds()
        return True

    def goes_on(self) -> None:
        """A step had no batch, although the loader that feeds the training has not ended."""
        if self.feeding and self.feeding not in self._over:
            self.parted, self._whole = True, 0

    def _see_parts(self, batch: Size | None) -> None:
        """If no batch waits for the first pass of a step, the pass continues the batch of the step before."""
        if batch is not None:
            self._whole += 1
            self.parted = self.parted and self._whole < _WHOLE
        elif self._passes == 1 and not self._fetches:
            self.goes_on()

    def _skip(self, first: Entry) -> None:
        """Before the first backward pass of a step, drops the batches that the loop skipped: as many as now wait beyond
        the number that waited after earlier steps. In a loop that fetches in bursts that number means nothing."""
        entries, repeated = self._entries, len(self._repeated or ())  # passes that take no batch of their own
        loader, waiting = self._loader, self._waiting.get(self._loader)
        if waiting is None:
            return
        fetched = [
            entry is not first and entry[0] == DATA and entry[3] == loader and entry[4] is not None for entry in entries
        ]
        later = sum(fetched[entries.index(first) :])
        left = max(0, len(waiting) + later + repeated - sum(entry[0] == BACKWARD for entry in entries))
        if self._ahead is not None:
            self._fetches_in_bursts = self._fetches_in_bursts or (left < self._ahead and not any(fetched))
            if left > self._ahead and not self._fetches_in_bursts:
                for _ in range(min(left - self._ahead, len(waiting) - 1)):
                    waiting.popleft()
                left = self._ahead
        self._ahead = left

    def _take_others(self, step: Breakdown) -> None:
        """Adds the batches of a backward pass that come from other loaders than the newest one, and further ones of that
        one: labeled and unlabeled samples, or two domains. If not all of these loaders were asked for this pass, it takes
        as many as the pass before. Batches count together once that has happened twice in a row."""
        before, fetched, self._fetched = self._several, self._fetched, {}
        if len(fetched) > 1:
            self._several = fetched
        elif fetched and not any(self._waiting.get(loader) for loader in before if loader not in fetched):
            self._several = {}
        ahead = 1 if before else min(fetched.values(), default=1)  # at first, some batches may be prefetched
        for loader, times in self._several.items():
            waiting = self._waiting.get(loader)
            if not waiting:
                continue
            self._fed.add(loader)
            for _ in range(min(times // ahead - (loader == self._loader), len(waiting))):
                size = waiting.popleft()
                step.take(size if before else None)

    def _oldest(self) -> Size | None:
        waiting = self._waiting.get(self._loader)
        if not waiting:
            return None
        self._feeds()
        return waiting.popleft()

    def _feeds(self) -> None:
        self.feeding = self._loader
        self._fed.add(self._loader)
        if self._loader not in self._over or not self.epoch:
            self.epoch = self._ends + 1


def _is_part(size: Size | None, batch: Size) -> bool:
    """True if a call's size has the same unit, tokens or samples, as the batch that it is a part of."""
    return size is not None and size[:2] != (None, None) and (size[1] is None) == (batch[1] is None)


def _with_tokens(batch: Size, size: Size | None) -> Size:
    """Adds tokens to a batch from which the loop makes tokens: of texts, or generated from prompts. size: of the call that
    has them; it may hold a part of the batch (several steps learn from it), or a row for each text of a pair."""
    samples, tokens, made = batch
    if size is None or size[1] is None or size[2] or tokens is not None or not made:
        return batch
    return size[0] if samples is None else min(samples, size[0] or samples), size[1], False


def _repeated(entries: Sequence[Entry]) -> set[int]:
    """Returns the places of backward passes on a batch that already had one (a critic and its generator, the second pass
    of sharpness-aware minimization): another optimizer stepped or gradients were cleared in between, and no batch was
    fetched. The first passes of a step may use the batch of the step before: those of a critic behind its generator."""
    repeated: set[int] = set()
    passes: list[int] = []  # since the last batch was fetched, and since it was used up
    before: list[int] = []
    asked = used = False
    for place, entry in enumerate(entries):
        kind = entry[0]
        if kind == BACKWARD:
            if used:
                repeated.add(place)
            else:
                passes.append(place)
        elif kind == DATA:
            repeated.update(before)
            before, passes = [], []
            asked, used = True, False
        elif passes and kind in (OPTIMIZER_END, CLEARED):
            if not asked and kind == OPTIMIZER_END:
                before = passes
            passes, used = [], True
    return repeated
