"""Finds evaluations and rollouts in the traces of steps: calls of the root model without gradients, and calls in evaluation
mode, together with the fetches from the loader that feeds them, are one span from the first to the last of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from perfagent.step import trace as kinds
from perfagent.step.trace import Entry, RolloutTrace, Trace, entries_of, trace_of

if TYPE_CHECKING:
    from perfagent.decode.phase_times import TraceReader
    from perfagent.step.state import StepState

__all__ = ["Evaluations"]

_QUIET_STEPS = 2
_STANDS_OUT = 3
"""Calls are no part of the step if they are more than so many times as many as in other steps."""
_TRAINS = (kinds.BACKWARD, kinds.BACKWARD_END, kinds.AUXILIARY, kinds.OPTIMIZER, kinds.OPTIMIZER_END)
_APART_NS = 60 * 10**9


class _Habit:
    """Learns how many calls without gradients, in training mode and one after another, the steps of a training make: up to
    three times as many as in the steps before are the step's own. The model's mode says too little: a teacher is in
    evaluation mode in every step, and some scripts evaluate in training mode.
    """

    __slots__ = ("_over_at", "_seen_at", "_usual")

    def __init__(self) -> None:
        self._seen_at = self._over_at = -_QUIET_STEPS - 1
        self._usual = 1

    def own_calls(self, step: int, entries: list[Entry], watched_from: int) -> set[int]:
        """Returns the positions of the calls that are the step's own. watched_from: of `LoopFacts`."""
        runs = list(_runs(entries))
        if not runs:
            return set()
        seen, self._seen_at = step - max(self._seen_at, watched_from) <= _QUIET_STEPS, step
        longest = max(map(len, runs))
        if longest > _STANDS_OUT * self._usual:
            again, self._over_at = step - self._over_at <= _QUIET_STEPS, step
            if again:
                self._usual = longest  # it happens in every step: a rollout
        elif seen:
            self._usual = max(self._usual, longest)
        usual = _STANDS_OUT * self._usual if seen else 0
        own = [run for run in runs if len(run) <= usual or any(entries[place][0] == kinds.PHASE for place in run)]
        return {place for run in own for place in run}


def _runs(entries: list[Entry]) -> Iterator[list[int]]:
    """Yields runs of calls without gradients in training mode, and of rollouts, as positions. A run ends at training,
    and at the end of a loader: after an evaluation's loader has ended, a call of a teacher is for the next step."""
    run: list[int] = []
    for place, entry in enumerate(entries):
        if (entry[0] == kinds.EVALUATED and entry[3]) or (entry[0] == kinds.PHASE and entry[3] == "rollout"):
            run.append(place)
        elif run and (entry[0] in _TRAINS or (entry[0] == kinds.FORWARD and entry[3]) or _ends_loader(entry)):
            yield run
            run = []
    if run:
        yield run


def _ends_loader(entry: Entry) -> bool:
    return bool(entry[0] == kinds.DATA and entry[3]) and entry[4] is None


def _is_of_another(fed: int, before: list[Entry], fetches: list[Entry]) -> bool:
    """True if the first fetch is from the loader that fed an evaluation, and another loader feeds the training."""
    if not fed or not fetches or fetches[0][3] != fed:
        return False
    return any(entry[0] == kinds.DATA and entry[4] is not None and entry[3] != fed for entry in (*before, *fetches))


def _feeds_another(fed: int, waiting: list[Entry]) -> bool:
    """True if the newest fetch is from another loader than the one that fed an evaluation, even if that one is gone and
    the new one has its id: that fetch may feed the next step."""
    fetches = [entry for entry in waiting if entry[0] == kinds.DATA]
    return (
        bool(fetches) and fetches[-1][4] is not None and any(entry[4] is None or entry[3] != fed for entry in fetches)
    )


class Evaluations:
    """Finds the evaluations in the traces of one run, step after step. Runs on the sender's thread."""

    __slots__ = ("_acted", "_acts_in_training", "_found", "_habit", "_traces")

    def __init__(self, traces: TraceReader) -> None:
        self._traces = traces
        self._habit = _Habit()
        self._found: list[tuple[str, float]] = []
        self._acted = False  # an environment was stepped in the current trace
        self._acts_in_training = False  # the model acts in training mode; in the other mode it is evaluated

    def fold(self, p: StepState, step: int, trace: Trace) -> Trace:
        """Returns the trace with each evaluation as one PHASE entry named "eval" in place of its entries."""
        self._acted = type(trace) is RolloutTrace
        folded = self._folded(p, step, entries_of(trace))
        self._report(p, step - 1, step)
        return trace_of(folded)

    def after(self, p: StepState, step: int, trace: Trace) -> float:
        """Returns the seconds of evaluation after the last step. A notebook may go on for hours and call the model now
        and then: calls far apart are not one evaluation."""
        if p.last is not None:  # this trace does not show in which mode the model was trained
            self._traces.trains(entries_of(p.last.trace))
        self._acted = type(trace) is RolloutTrace
        folded = self._folded(p, step + 1, entries_of(trace), apart_ns=_APART_NS)
        self._report(p, step, step)
        spent_ns: int = sum(entry[2] - entry[1] for entry in folded if entry[0] == kinds.PHASE and entry[3] == "eval")
        return spent_ns / 1e9

    def _folded(self, p: StepState, step: int, entries: list[Entry], *, apart_ns: float = math.inf) -> list[Entry]:
        trains, batches = self._traces.trains(entries), self._traces.batches
        own = self._habit.own_calls(step, entries, p.links.facts.watched_from)
        if self._acted and not self._acts_in_training:
            self._acts_in_training = any(entry[0] == kinds.EVALUATED and entry[3] for entry in entries)
        folded: list[Entry] = []
        fetches: list[Entry] = []  # since the last call that showed their purpose, with the step's own calls after them
        span: list[int] = []  # began, ended
        fed = 0  # the loader that fed the span
        inside = 0  # calls in evaluation mode with gradients that have not returned
        graded: list[Entry] | None = []  # those calls of the span; None if the span has other calls
        trained = False  # one of the span's calls was in training mode
        for place, entry in enumerate(entries):
            kind = entry[0]
            feeds = kind == kinds.DATA and entry[3] == (batches.feeding or None)
            if kind == kinds.DATA and entry[4] is None:
                batches.feeding = 0  # the iterator ended; the next one may get its id
            if kind == kinds.DATA and not feeds:
                fetches.append(entry)
            elif kind == kinds.PHASE and inside and entry[3] == "compile":
                continue  # of the call that is being evaluated, and part of it
            elif kind == kinds.RETURNED and inside:
                inside -= 1
                span[1] = entry[1]
                if graded is not None:
                    graded.append(entry)
            elif kind == kinds.EVALUATED and place in own and (not span or _feeds_another(fed, fetches)):
                (fetches or folded).append(entry)
            elif kind == kinds.EVALUATED or (kind == kinds.FORWARD and trains and not entry[3]):
                began = min([entry[1], *(fetch[1] for fetch in fetches)])
                if span and began - span[1] > apart_ns:
                    folded += self._closed(span, [], self._name(fed, trained=trained))
                    span, graded, trained = [], [], False
                while folded and folded[-1][0] == kinds.EVALUATED and folded[-1][1] >= began:
                    folded.pop()  # a call of another model with the same batch
                span = span or [began, began]
                span[1] = entry[2] if kind == kinds.EVALUATED else entry[1]
                inside += kind == kinds.FORWARD
                if kind == kinds.EVALUATED:
                    graded, trained = None, trained or bool(entry[3])
                elif graded is not None:
                    graded += [*fetches, entry]
                fed = next((fetch[3] for fetch in reversed(fetches) if fetch[0] == kinds.DATA), fed)
                fetches = []
            else:
                if kind == kinds.BACKWARD and span and graded is not None:  # a critic through which its actor learns
                    folded += [*graded, *fetches, entry]
                else:
                    name, broke_off = self._name(fed, trained=trained), _is_of_another(fed, folded, fetches)
                    folded += [*self._closed(span, fetches, name, broke_off=broke_off), entry]
                span, fetches, inside, fed, graded, trained = [], [], 0, 0, [], False
        folded += self._closed(
            span, fetches, self._name(fed, trained=trained), broke_off=_is_of_another(fed, folded, fetches)
        )
        return folded

    def _name(self, fed: int, *, trained: bool) -> str:
        """Returns the name of a folded span. fed: the loader that fed it, or 0."""
        return "rollout" if self._acted and not fed and (trained or not self._acts_in_training) else "eval"

    def _closed(self, span: list[int], fetches: list[Entry], name: str, *, broke_off: bool = False) -> list[Entry]:
        """Returns a finished evaluation and the fetches after it. broke_off: the loop stopped the evaluation early, and
        the first fetch was one too many from its loader."""
        if not span:
            return fetches
        if fetches and (broke_off or (fetches[0][3] and fetches[0][4] is None)):
            span[1] = fetches.pop(0)[2]  # this fetch met the end of the evaluation's loader; loader 0: a new one begins
        self._found.append((name, (span[1] - span[0]) / 1e9))
        return [(kinds.PHASE, span[0], span[1], name, None, None), *fetches]

    def _report(self, p: StepState, begin_step: int, step: int) -> None:
        for name, seconds in self._found:
            p.report_phase(name, begin_step, seconds, step, always=False)
        self._found = []
