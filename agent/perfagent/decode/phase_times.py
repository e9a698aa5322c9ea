"""Turns the stamps of a step (step/trace.py) into the time of each phase and the number of samples.

Runs on the sender's thread, in step order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product, takewhile
from operator import itemgetter
from typing import Any

from perfagent.decode.batch_pairing import Batches
from perfagent.decode.breakdown import NOTHING, Breakdown, ForwardPass
from perfagent.step import trace as kinds
from perfagent.step.trace import Entry, Trace

__all__ = ["Breakdown", "TraceReader"]


def _usual_layouts() -> dict[int, tuple[Any, ...]]:
    """By the number of items, the traces of steps with at most one batch, one call of the model, and one clearing of
    gradients after it: a getter of the entries' kinds, these kinds, and where the entries begin; -1 for one that is not
    there."""
    found = {}
    asked = (kinds.DATA, kinds.FORWARD, kinds.RETURNED, kinds.CLEARED, kinds.BACKWARD)
    for data, returned, cleared in product((True, False), repeat=3):
        order = [kinds.DATA] * data + [kinds.FORWARD] + [kinds.RETURNED] * returned + [kinds.CLEARED] * cleared
        order += [kinds.BACKWARD, kinds.BACKWARD_END, kinds.OPTIMIZER, kinds.OPTIMIZER_END]
        ends = [*accumulate(kinds.FIELDS[kind] for kind in order)]
        begins = dict(zip(order, (0, *ends), strict=False))
        places = tuple([begins.get(kind, -1) for kind in asked])
        found[ends[-1]] = itemgetter(*(end - 1 for end in ends)), tuple(order), places
    return found


_USUAL = _usual_layouts()


class TraceReader:
    """Reads the traces of one run, one step after another."""

    def __init__(self) -> None:
        self.training_only = False
        """True if the model is trained in training mode."""
        self.batches = Batches()

    def read(self, entries: Sequence[Entry], *, device: bool = False) -> Breakdown:
        """Returns the parts of a step. device: the entries carry events of a device clock."""
        reading = _Reading(self, entries, device=device)
        for place, entry in enumerate(entries):
            _READERS[entry[0]](reading, place, entry)
        self.batches.end(reading.step)
        return reading.step

    def read_usual(self, trace: Trace) -> Breakdown | None:
        """`read` for the usual layouts without a device clock, six times as fast. None for any other; nothing is learned
        then."""
        layout = _USUAL.get(len(trace))
        if layout is None or layout[0](trace) != layout[1]:
            return None
        data, forward, returned, cleared, backward = layout[2]
        size = trace[forward + 3] if data < 0 else trace[3]
        if (
            not trace[forward + 2]
            or trace[backward + 2] is None
            or (data >= 0 and (size is None or trace[forward + 3]))
        ):
            return None  # in evaluation mode; a pipeline's stage; the end of an epoch; a batch in parts
        if not self.batches.took_alone(None if data < 0 else trace[2]):
            return None
        step = Breakdown()
        end = returned if returned >= 0 and trace[returned + 2] else backward
        spent = trace[end] - trace[forward]
        if 0 <= cleared < end:
            spent -= trace[cleared + 1] - trace[cleared]
        if data >= 0:
            step.data_ns = trace[1] - trace[0]
        step.forward_ns = spent or None
        step.backward_ns = trace[backward + 5] - trace[backward]
        step.optimizer_ns = trace[-3] - trace[-6]
        step.root = trace[backward + 2]
        step.take(size)
        return step

    def trains(self, entries: Sequence[Entry]) -> bool:
        """True if the model is trained in training mode, so that a call in evaluation mode belongs to no step."""
        self.training_only = self.training_only or any(entry[0] == kinds.FORWARD and entry[3] for entry in entries)
        return self.training_only


class _Reading:
    """Reads one step's trace, entry by entry."""

    __slots__ = (
        "_backward_at", "_backward_event", "_batches", "_device", "_entries", "_forward", "_in_optimizer",
        "_inside_ns", "_optimizer_at", "_optimizer_event", "_spans", "_traces", "_ungraded", "_unseen_call", "step",
    )  # fmt: skip

    def __init__(self, traces: TraceReader, entries: Sequence[Entry], *, device: bool) -> None:
        self.step = Breakdown()
        if device:
            self.step.device = {}
        self._traces, self._entries, self._device = traces, entries, device
        self._forward, self._batches = ForwardPass(), traces.batches
        self._batches.begin(entries)
        self._backward_at = self._optimizer_at = 0
        self._backward_event: Any = None
        self._optimizer_event: Any = None
        self._in_optimizer = False
        self._inside_ns = 0  # of parts within the optimizer's step that are timed separately
        self._unseen_call = False  # a model that nobody watches was called within the optimizer's step
        self._spans: list[tuple[int, int]] = []  # what was counted, by its end; for phases around it
        self._ungraded: list[tuple[int, int]] = []  # calls without gradients

    def data(self, _place: int, entry: Entry) -> None:
        _, began, ended, loader, size = entry
        self.step.data_ns = (self.step.data_ns or 0) + ended - began
        self._spans.append((began, ended))
        self._forward.pause(ended - began)
        if self._in_optimizer:
            self._inside_ns += ended - began
        if size is None:
            self._batches.turn(loader)
        else:
            self._batches.fetched(loader, size)

    def forward(self, _place: int, entry: Entry) -> None:
        _, at, event, training, size = entry
        if self._backward_at:
            return  # activation checkpointing runs the model again
        if not training and self._traces.trains(self._entries):
            self._forward.ignored += 1
            return
        self._batches.asked(graded=True)
        self._forward.begin(at, event)
        self._forward.called(size)

    def auxiliary(self, _place: int, entry: Entry) -> None:
        self._forward.begin(entry[1], entry[2])

    def evaluated(self, _place: int, entry: Entry) -> None:
        """A call without gradients that is no evaluation: a teacher, or samples of a generator."""
        _, at, ended, _, event, end_event = entry
        self._ungraded.append((at, ended))
        self._batches.asked(graded=False)
        if not self._device:
            self._forward.ungraded(ended - at)
        elif not self._forward.began:
            self.step.pair("forward", event, end_event)

    def cleared(self, _place: int, entry: Entry) -> None:
        """Takes clearing off the forward pass, since many loops clear the gradients within it."""
        self._forward.pause(entry[2] - entry[1])

    def returned(self, _place: int, entry: Entry) -> None:
        if not self._backward_at:
            if entry[3]:
                self._note_forward(entry[1])
            self._forward.returned(entry[1], entry[2], holds_loss=entry[3])

    def backward(self, place: int, entry: Entry) -> None:
        _, at, event, root, _ = entry
        step = self.step
        self._backward_at, self._backward_event = at, event
        self._note_forward(at)
        if root is not None:
            step.root = root
        spent, size, calls, pairs = self._forward.end(at, event)
        for begin, end in pairs:
            step.pair("forward", begin, end, inside="optimizer" if self._in_optimizer else "")
        if spent:
            step.forward_ns = (step.forward_ns or 0) + spent
            step.forwards += calls
            if self._in_optimizer:
                self._inside_ns += spent
        self._batches.backward(place, size, calls, step, in_closure=self._in_optimizer)

    def backward_end(self, _place: int, entry: Entry) -> None:
        _, ended, event = entry
        if not self._backward_at:
            return  # the pass began in the step before, which an optimizer that steps inside the pass has ended
        self.step.backward_ns += ended - self._backward_at
        self._spans.append((self._backward_at, ended))
        if self._in_optimizer:
            self._inside_ns += ended - self._backward_at
        if self._device:
            self.step.pair("backward", self._backward_event, event, inside="optimizer" if self._in_optimizer else "")
        self._backward_at = 0

    def optimizer(self, _place: int, entry: Entry) -> None:
        _, at, event = entry
        self._in_optimizer, self._optimizer_at, self._optimizer_event, self._inside_ns = True, at, event, 0
        if self._backward_at:  # the optimizer steps inside the pass, which continues afterward
            self.step.backward_ns += at - self._backward_at
            if self._device:
                self.step.pair("backward", self._backward_event, event)

    def optimizer_end(self, _place: int, entry: Entry) -> None:
        _, ended, event = entry
        if self._backward_at:
            self._backward_at, self._backward_event = ended, event
        if self._in_optimizer:
            self._spans.append((self._optimizer_at, ended))
            self.step.optimizer_ns += ended - self._optimizer_at - self._inside_ns
            if self._device and not self._unseen_call:
                self.step.pair("optimizer", self._optimizer_event, event)
        self._in_optimizer = self._unseen_call = False

    def phase(self, _place: int, entry: Entry) -> None:
        _, began, ended, name, event, end_event = entry
        step = self.step
        if event is not None and self._device:
            step.pair(name, event, end_event, inside=self._running())
            return
        named, begins = self._counted_within(began, ended)
        spent = ended - began - named
        self._spans.append((began, ended))
        if name == kinds.UNNAMED:
            self._unseen_call = True
        elif step.phases_ns is NOTHING:
            step.phases_ns = {name: spent}
        else:
            step.phases_ns[name] = step.phases_ns.get(name, 0) + spent
        if self._backward_at:
            step.backward_ns -= spent
            return
        if not begins:
            self._forward.pause(spent)
        if self._in_optimizer:
            self._inside_ns += spent

    def _counted_within(self, began: int, ended: int) -> tuple[int, bool]:
        """Returns, for a phase, the ns within it that are counted separately (waits, other phases and passes, but not calls
        without gradients alone), and whether the forward pass that runs at its end began in it."""
        inside = [*takewhile(lambda span: span[1] > began, reversed(self._spans))]
        begins = self._forward.began >= began
        if begins:
            inside.append((self._forward.began, ended))
        if not inside:
            return 0, False  # as for most phases
        ungraded = takewhile(lambda span: span[1] > began, reversed(self._ungraded))
        return _covered([*inside, *ungraded], began), begins

    def _note_forward(self, at: int) -> None:
        if self._forward.began:
            self._spans.append((self._forward.began, at))

    def _running(self) -> str:
        if self._backward_at:
            return "backward"
        return "forward" if self._forward.began else "optimizer" * self._in_optimizer


_READERS = (
    _Reading.data, _Reading.forward, _Reading.returned, _Reading.backward, _Reading.backward_end, _Reading.optimizer,
    _Reading.optimizer_end, _Reading.phase, _Reading.cleared, _Reading.evaluated, _Reading.auxiliary,
)  # fmt: skip
"""By the kind of an entry."""


def _covered(spans: list[tuple[int, int]], since: int) -> int:
    """Returns the time that the spans cover together."""
    covered = 0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, since))
        since = max(since, end)
    return covered
