"""Which batches a step consumed, and with that how many samples and tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfagent.decode.forward_pass import Size
from perfagent.step.trace import BACKWARD, CLEARED, DATA, OPTIMIZER_END, Entry

if TYPE_CHECKING:
    from perfagent.decode.phase_times import Breakdown

__all__ = ["Batches"]

_MOST_BATCHES = 256
"""Batches of one loader that may wait for a backward pass (evaluation loaders never get one)."""
_MOST_LOADERS = 8
_WHOLE = 8
"""So many batches in a row, each of one step, and batches are no longer taken in parts."""


class Batches:
    """Batches are paired with backward passes first in, first out, by loader: a framework may fetch several ahead, and a loader
    whose batches are followed by no backward pass (evaluation) adds nothing, and what a loop skips of the others is left out.
    Where a loop takes from several loaders before each backward pass, their batches are one.

    Told what is in a step's trace, in its order, from `begin` to `end`.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Size]] = {}
        self._loader = 0
        self._fed: set[int] = set()  # loaders of whose batches one was followed by a backward pass
        self._over: set[int] = set()  # of those, the ones at their end
        self._fetched: dict[int, int] = {}  # by loader, since the last backward pass
        self._several: dict[int, int] = {}  # the same before that one, where they were of several loaders
        self._evaluated = 0  # the loader of whose last batch a model without gradients was asked
        self._begins = False  # the next batch is the first of its loader
        self._ahead: int | None = None  # how many batches wait after a step, as a rule
        self._fetches_in_bursts = False
        self.parted = False
        """Whether a batch is taken in parts, a step each (a long sequence): then the model's calls tell what a step consumed."""
        self._whole = 0  # batches in a row of which each was one step's
        self.feeding = 0
        """The loader whose batches are followed by backward passes, by its id; 0 from the end of its epoch on."""
        self.epochs = 0
        """How often such a loader has come to its end."""
        self.begin([])

    # ---- a step, in the order of its trace

    def begin(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._fetches = self._passes = 0
        self._repeated: set[int] | None = None
        self._again = 0  # passes of loops without a loader on a batch that had one before, as it seems

    def fetched(self, loader: int, size: Size) -> None:
        self._fetches += 1
        self._loader = loader
        for other in self._over - self._fed:  # its one batch was no training's
            self._over.discard(other)
            self._waiting.pop(other, None)
            self._fetched.pop(other, None)
        if self._begins or loader in self._over:  # another one with the id of one that is gone
            if loader in self._waiting and loader not in self._over:
                self._waiting[loader].clear()  # the loop broke off
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
            self._fetched.pop(self._evaluated, None)  # that was an evaluation
            self._evaluated = 0
        self._fetched[loader] = self._fetched.get(loader, 0) + 1

    def turn(self, loader: int) -> None:
        """A loader is at its end, or (0) another one begins: what waits of one that never fed a backward pass waits in vain."""
        self._ahead = None
        if not loader:
            self._begins = True
            for one in [one for one in self._waiting if one not in self._fed and one not in self._fetched]:
                del self._waiting[one]
        elif loader in self._fed or self._fetched == {loader: 1}:  # of one batch, its end is found by looking ahead
            self.epochs += loader in self._fed - self._over
            self._over.add(loader)  # what was fetched ahead of it is yet to come
        else:
            self._waiting.pop(loader, None)
            self._fetched.pop(loader, None)
            self._loader = next(reversed(self._fetched), self._loader)  # a batch of another one waits since before

    def asked(self, *, graded: bool) -> None:
        """A model was called. graded: the root, with gradients; else another one, or without."""
        self._evaluated = self._loader if self._fetched and not graded else 0

    def backward(self, place: int, size: Size | None, calls: int, step: Breakdown, *, in_closure: bool) -> None:
        """A backward pass, that at this place. size, calls: of the calls of the model that led to it."""
        if self._repeated is None:
            self._repeated = _repeated(self._entries)
        if place in self._repeated:
            if self._fed:
                return
            if not in_closure and step.has_size:  # a closure works through its batch anew each time it is called
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
        if self._again > 1:  # each may have had a batch of its own: five of a critic to one of its generator
            step.samples = step.tokens = step.embedded_tokens = 0
        self._entries = ()

    # ---- what is learned of the loop

    def has_waiting(self, loader: int | None) -> bool:
        """Whether batches of a loader wait for their backward pass, as they do where some are fetched ahead. None: of the one
        that was asked last."""
        return bool(self._waiting.get(self._loader if loader is None else loader))

    def took(self, loader: int) -> None:
        """Each batch of some steps, all of this loader, was followed by its own backward pass."""
        self._loader = self.feeding = loader
        self._fed.add(loader)
        self._ahead, self._begins = 0, False

    def goes_on(self) -> None:
        """A step without a batch, though the loader that feeds the training is not at its end."""
        if self.feeding and self.feeding not in self._over:
            self.parted, self._whole = True, 0

    def _see_parts(self, batch: Size | None) -> None:
        """A backward pass. Where no batch waits for the first of a step, it goes on with that of the step before."""
        if batch is not None:
            self._whole += 1
            self.parted = self.parted and self._whole < _WHOLE
        elif self._passes == 1 and not self._fetches:
            self.goes_on()

    def _skip(self, first: Entry) -> None:
        """Before the first backward pass of a step: leaves out the batches that the loop skipped. They are those by which more
        wait after this step than after the ones before. Where a loop fetches some, and then none for several steps, that says
        nothing."""
        entries, repeated = self._entries, len(self._repeated or ())  # passes that take no batch of their own
        loader, waiting = self._loader, self._waiting.get(self._loader)
        if waiting is None:
            return
        fetched = [entry is not first and entry[0] == DATA and entry[3] == loader and entry[4] is not None for entry in entries]
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
        """What a backward pass has of other loaders than the one that was asked last, and more than one batch of that: labeled
        samples and unlabeled ones, two domains. What came only once was a sample to look at. Where not all of them were asked for
        it, it has as many as the one before, of what was fetched ahead."""
        before, fetched, self._fetched = self._several, self._fetched, {}
        if len(fetched) > 1:
            self._several = fetched
        elif fetched and not any(self._waiting.get(loader) for loader in before if loader not in fetched):
            self._several = {}
        ahead = 1 if before else min(fetched.values(), default=1)  # of a first one, some may be fetched for the next ones
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
        self.feeding = self._loader
        self._fed.add(self._loader)
        return waiting.popleft()


def _is_part(size: Size | None, batch: Size) -> bool:
    """Whether a call's size tells of tokens, or of samples, what the batch that it is a part of does."""
    return size is not None and size[:2] != (None, None) and (size[1] is None) == (batch[1] is None)


def _with_tokens(batch: Size, size: Size | None) -> Size:
    """A batch of which the loop makes tokens: of texts, or of what it has generated from prompts. size: of the call that has
    them; it may be of a part of the batch (of which several steps learn), or have a row for each text of a pair."""
    samples, tokens, made = batch
    if size is None or size[1] is None or size[2] or tokens is not None or not made:
        return batch
    return size[0] if samples is None else min(samples, size[0] or samples), size[1], False


def _repeated(entries: Sequence[Entry]) -> set[int]:
    """Places of the backward passes on a batch that had one before: another optimizer stepped in between, or the gradients were
    cleared, and no batch was asked for. A critic and its generator, the second look of sharpness-aware minimization. The first
    passes of a step may be on the batch of the step before: those of a critic that learns after its generator."""
    repeated: set[int] = set()
    passes: list[int] = []  # since the last batch was asked for, and since it was used up
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
