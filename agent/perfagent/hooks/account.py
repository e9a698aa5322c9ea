"""Turns the stamps of a step (trace.py) into the time of each phase and the number of samples. Runs on the sender's thread, in
step order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from perfagent.device import Value
from perfagent.hooks.passes import ForwardPass, Size
from perfagent.hooks.trace import (
    BACKWARD,
    BACKWARD_END,
    BESIDE,
    CLEARED,
    DATA,
    EVALUATED,
    FORWARD,
    NEWEST,
    OPTIMIZER,
    OPTIMIZER_END,
    PHASE,
    RETURNED,
    UNNAMED,
    Entry,
)

__all__ = ["Account", "Breakdown"]

_MOST_BATCHES = 256
"""Batches of one loader that may wait for a backward pass (evaluation loaders never get one)."""
_MOST_LOADERS = 8
_WHOLE = 8
"""So many batches in a row, each of one step, and batches are no longer taken in parts."""

_NOTHING: dict[str, Any] = {}


class Breakdown:
    """What one step consisted of. None is what cannot be known; device: pairs of events by phase, where a device clock runs.

    Most steps leave most of it as it is here, on the class: making one costs next to nothing.
    """

    data_ns: int | None = None
    forward_ns: int | None = None
    backward_ns = optimizer_ns = 0
    batches = forwards = 0
    root: Value | None = None
    """What the last backward pass started from that had a loss."""
    samples = tokens = embedded_tokens = 0
    phases_ns: dict[str, int] = _NOTHING
    device: dict[str, list[tuple[Any, Any]]] = _NOTHING
    device_inside: tuple[tuple[str, Any, Any], ...] = ()
    """(phase, begin, end) of what lies in a phase and is counted for itself: its time is to be taken off that phase."""

    @property
    def has_size(self) -> bool:
        return bool(self.samples or self.tokens or self.embedded_tokens)

    def take(self, size: Size | None) -> None:
        if size is None:
            return
        samples, tokens, only_with_embedding = size
        self.samples += samples or 0
        if only_with_embedding:
            self.embedded_tokens += tokens or 0
        else:
            self.tokens += tokens or 0


class Account:
    """Reads the traces of one run, one step after the other.

    Batches are paired with backward passes first in, first out, by loader: a framework may fetch several ahead, and a loader
    whose batches are followed by no backward pass (evaluation) adds nothing, and what a loop skips of the others is left out.
    Where a loop takes from several loaders before each backward pass, their batches are one.
    """

    def __init__(self) -> None:
        self.averages: bool | None = None
        """Whether several undivided roots of a step are averaged; None until it is known."""
        self.micro_batches = 0.0
        """By how many micro-batches the losses of a full window are divided, where the script does that; 0.0: not known."""
        self.divided_later = False
        """Whether it is the gradients of a step that are divided by the number of its losses, once all are backpropagated."""
        self.embedded = False
        """Whether the model has an embedding, so that integer matrices are tokens."""
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
        self._training_only = False
        self._forward = ForwardPass()
        self.evaluations: Any = None
        """Finds evaluations (evaluation.py); asked where a trace may hold one."""
        self.feeding = 0
        """The loader whose batches are followed by backward passes, by its id; 0 from the end of its epoch on."""
        self.epochs = 0
        """How often such a loader has come to its end."""

    def read(self, entries: Sequence[Entry], *, device: bool = False) -> Breakdown:
        """device: the entries carry events of a device clock."""
        step = Breakdown()
        if device:
            step.device = {}
        forward = self._forward
        forward.reset()
        backward_at = optimizer_at = 0
        backward_event = optimizer_event = None
        optimizer_depth = inside_ns = 0
        unseen_call = False
        fetches = passes = 0
        repeated: set[int] | None = None
        again = 0  # passes of loops without a loader on a batch that had one before, as it seems
        for place, entry in enumerate(entries):
            kind, at = entry[0], entry[1]
            if kind == DATA:
                wait = entry[2] - at
                step.data_ns = (step.data_ns or 0) + wait
                forward.pause(at, entry[2])
                if optimizer_depth:
                    inside_ns += wait
                if entry[4] is None:
                    self._turn(entry[3])
                else:
                    fetches += 1
                    self._queue(entry[3], entry[4])
            elif kind == FORWARD:
                if backward_at:
                    continue  # activation checkpointing runs the model again
                if not entry[3] and self.trains(entries):
                    forward.ignored += 1
                    continue
                self._evaluated = 0
                forward.begin(at, entry[2], entry[4])
            elif kind == BESIDE:
                if device:
                    forward.begin_on_device(at, entry[2])
                else:
                    forward.beside(at, entry[3], open_end=True)
            elif kind == EVALUATED:  # and no evaluation: a teacher, or samples of a generator
                self._evaluated = self._loader if self._fetched else 0
                if not device:
                    forward.beside(at, entry[2], open_end=False)
                elif not forward.runs:
                    _pair(step.device, "forward", entry[4], entry[5])
            elif kind == CLEARED:
                forward.pause(at, entry[2])  # many loops clear the gradients there: no timer calls that a forward pass
            elif kind == RETURNED:
                if not backward_at:
                    forward.returned(at, entry[2], holds_loss=entry[3])
            elif kind == BACKWARD:
                backward_at, backward_event = at, entry[2]
                if entry[3] is not None:
                    step.root = entry[3]
                spent, size, calls, pairs = forward.end(at, backward_event)
                for begin, end in pairs:
                    _pair(step.device, "forward", begin, end)
                    if optimizer_depth and begin is not None and end is not None:
                        step.device_inside += (("optimizer", begin, end),)
                if spent:
                    step.forward_ns = (step.forward_ns or 0) + spent
                    step.forwards += calls
                    if optimizer_depth:
                        inside_ns += spent
                if repeated is None:
                    repeated = _repeated(entries)
                if place in repeated:
                    if self._fed:
                        continue
                    if not optimizer_depth and step.has_size:  # a closure works through its batch anew each time it is called
                        again += size is not None
                        size = None
                if not passes:
                    self._skip(entries, entry, len(repeated))
                passes += 1
                batch = self._oldest()
                if batch is not None:
                    step.batches += 1
                part = None if fetches and not self.parted else size
                self._see_parts(batch, first=passes == 1, fetched=bool(fetches))
                several = bool(self._several)
                if self._fetched or several:
                    self._take_others(step)
                if batch is None or (not several and _is_part(part, batch)):
                    step.take(part)
                else:
                    step.take(size if not several and calls == 1 and _tells_tokens_of(size, batch) else batch)
            elif kind == BACKWARD_END:
                if not backward_at:
                    continue  # it began in the step before: an optimizer that steps inside of the pass ended that step
                step.backward_ns += at - backward_at
                if optimizer_depth:
                    inside_ns += at - backward_at
                if device:
                    _pair(step.device, "backward", backward_event, entry[2])
                    if optimizer_depth and backward_event is not None:
                        step.device_inside += (("optimizer", backward_event, entry[2]),)
                backward_at = 0
            elif kind == OPTIMIZER:
                optimizer_depth, optimizer_at, optimizer_event, inside_ns = 1, at, entry[2], 0
                if backward_at:  # it steps inside of the pass, which goes on afterwards
                    step.backward_ns += at - backward_at
                    if device:
                        _pair(step.device, "backward", backward_event, optimizer_event)
            elif kind == OPTIMIZER_END:
                if backward_at:
                    backward_at, backward_event = at, entry[2]
                if optimizer_depth:
                    step.optimizer_ns += at - optimizer_at - inside_ns
                    if device and not unseen_call:
                        _pair(step.device, "optimizer", optimizer_event, entry[2])
                optimizer_depth, unseen_call = 0, False
            elif kind == PHASE:
                if entry[4] is not None and device:
                    _pair(step.device, entry[3], entry[4], entry[5])
                    outer = "backward" if backward_at else "forward" if forward.runs else "optimizer" if optimizer_depth else ""
                    if outer:
                        step.device_inside += ((outer, entry[4], entry[5]),)
                    continue
                named, begins = _named_within(entries, place, training_only=self._training_only)
                spent = entry[2] - at - named
                if entry[3] == UNNAMED:
                    unseen_call = True
                elif step.phases_ns is _NOTHING:
                    step.phases_ns = {entry[3]: spent}
                else:
                    step.phases_ns[entry[3]] = step.phases_ns.get(entry[3], 0) + spent
                if backward_at:
                    step.backward_ns -= spent
                else:
                    if named and not begins:
                        forward.pause(entry[2], entry[2] + spent)  # behind the calls in it, which have a name
                    elif not begins:
                        forward.pause(at, entry[2])
                    if optimizer_depth:
                        inside_ns += spent
        if again > 1:  # each may have had a batch of its own: five of a critic to one of its generator
            step.samples = step.tokens = step.embedded_tokens = 0
        return step

    def _see_parts(self, batch: Size | None, *, first: bool, fetched: bool) -> None:
        """A backward pass. first: of its step. Where no batch waits for it, it goes on with that of the step before."""
        if batch is not None:
            self._whole += 1
            self.parted = self.parted and self._whole < _WHOLE
        elif first and not fetched:
            self.goes_on()

    def goes_on(self) -> None:
        """A step without a batch, though the loader that feeds the training is not at its end."""
        if self.feeding and self.feeding not in self._over:
            self.parted, self._whole = True, 0

    def trains(self, entries: Sequence[Entry]) -> bool:
        """Whether the model is trained in training mode, so that a call in evaluation mode is none of a step."""
        self._training_only = self._training_only or any(entry[0] == FORWARD and entry[3] for entry in entries)
        return self._training_only

    def has_waiting(self, loader: int | None) -> bool:
        """Whether batches of a loader wait for their backward pass, as they do where some are fetched ahead. None: of the one
        that was asked last."""
        return bool(self._waiting.get(self._loader if loader is None else loader))

    def took(self, loader: int) -> None:
        """Each batch of some steps, all of this loader, was followed by its own backward pass."""
        self._loader = self.feeding = loader
        self._fed.add(loader)
        self._ahead, self._begins = 0, False

    def _turn(self, loader: int) -> None:
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

    def _skip(self, entries: Sequence[Entry], first: Entry, repeated: int) -> None:
        """Before the first backward pass of a step: leaves out the batches that the loop skipped. They are those by which more
        wait after this step than after the ones before. Where a loop fetches some, and then none for several steps, that says
        nothing. repeated: how many of its passes take no batch of their own."""
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

    def _queue(self, loader: int, size: Size) -> None:
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


def _tells_tokens_of(size: Size | None, batch: Size) -> bool:
    """Whether a call names the tokens of a batch that has none: the loop makes them, of texts or of what it has generated."""
    return size is not None and size[1] is not None and not size[2] and batch[1] is None


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


def _named_within(entries: Sequence[Entry], phase: int, *, training_only: bool) -> tuple[int, bool]:
    """Of a phase (its place) the ns that have a name of their own: waits, other phases and passes of the step that lie in it, not
    calls without gradients alone (a rollout); and whether the forward pass that runs at its end began in it."""
    began, ended = entries[phase][1:3]
    first = phase
    while first and entries[first - 1][1] >= began:  # what lies in it stands before it
        first -= 1
    if first == phase:
        return 0, False  # as most
    spans: list[tuple[int, int]] = []
    ungraded: list[tuple[int, int]] = []
    root = forward = backward = optimizer = 0
    for entry in entries[max(0, first - NEWEST) : phase]:
        kind, at = entry[0], entry[1]
        if kind == DATA or (kind == PHASE and entry[4] is None):
            spans.append((at, entry[2]))
        elif kind == EVALUATED:
            ungraded.append((at, entry[2]))
        elif kind == BESIDE:
            spans.append((at, entry[3]))
            forward = root or entry[3]  # the pass goes on until backward
        elif kind == FORWARD and not backward and (entry[3] or not training_only):
            forward = root = root or at
        elif kind == BACKWARD or (kind == RETURNED and entry[3] and not backward):
            if forward:
                spans.append((forward, at))
            root = forward = 0
            backward = at if kind == BACKWARD else 0
        elif kind == BACKWARD_END:
            spans.append((backward or at, at))
            backward = 0
        elif kind == OPTIMIZER:
            optimizer = at
        elif kind == OPTIMIZER_END:
            spans.append((optimizer or at, at))
    begins = forward >= began
    if begins:
        spans.append((forward, ended))
    named = _covered(spans, began)
    return (_covered(spans + ungraded, began) if named else 0), begins


def _covered(spans: list[tuple[int, int]], since: int) -> int:
    """What some spans cover together."""
    covered = 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, since))
        since = max(since, end)
    return covered


def _pair(device: dict[str, list[tuple[Any, Any]]], phase: str, begin: Any, end: Any) -> None:
    if begin is not None and end is not None:
        device.setdefault(phase, []).append((begin, end))
