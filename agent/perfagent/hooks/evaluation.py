"""Recognizes evaluations between steps, by a framework's own loop or by calls of the root model without backward.

A plain loop is recognized later, on the sender's thread, from the order of the trace: calls of the root model without
gradients, and calls in evaluation mode, together with the fetches from the loader that feeds them, are one span from
the first to the last of them. Calls without gradients in training mode count only as an interruption: what every step
does (a rollout, a teacher's answer, the generator's samples for a discriminator) is part of the training, and of its
forward pass. Calls of a model that nobody watches are recognized by its loader (decode/evaluations.py).

If an environment was stepped in the same span, the model chose actions there: that is a rollout, a phase of its own. So
is the text that a language model generates in training mode.

An evaluation is part of the step that follows it. An evaluation after the last step is reported when the run ends, in
a row of its own.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from threading import get_ident
from typing import Any

from perfagent.boundary.dynamo import not_traced
from perfagent.boundary.guard import guarded
from perfagent.decode.evaluations import unseen_evaluations
from perfagent.decode.phase_times import Account
from perfagent.hooks.phases import device_mark, tell, watch_phase
from perfagent.step.row import StepRow
from perfagent.step.state import Progress, now, state
from perfagent.step.trace import (
    BACKWARD,
    BACKWARD_END,
    BESIDE,
    DATA,
    EVALUATED,
    FORWARD,
    MOST_ITEMS,
    OPTIMIZER,
    OPTIMIZER_END,
    PHASE,
    RETURNED,
    Entry,
    Trace,
    entries_of,
    shorten,
    trace_of,
)

__all__ = [
    "Evaluations", "after_last_step", "evaluated", "interrupted", "watch_environment", "watch_generation",
]  # fmt: skip

_QUIET_STEPS = 2
_STANDS_OUT = 3
"""Calls are no part of the step if they are more than so many times as many as in other steps."""
_MOST_OUTPUTS = 8
_TRAINS = (BACKWARD, BACKWARD_END, BESIDE, OPTIMIZER, OPTIMIZER_END)
_MOST_TIMED = 400
"""Items of a trace up to which the device's clock times such calls; later ones (an evaluation) are timed
by the host."""
_APART_NS = 60 * 10**9


def watch_generation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that asks a model for one token after another. In training mode that is a rollout."""
    rollout = watch_phase("rollout")(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        writes = getattr(self, "training", False)  # models that are not torch's have this method, too
        return (rollout if writes else original)(self, *args, **kwargs)

    return generate


class Interrupted(list[Any]):
    """A trace that may hold an evaluation. The type marks it, so that traces of ordinary steps are not searched."""


class Acted(Interrupted):
    """A trace in which an environment was stepped: an evaluation without a loader is then a rollout."""


def watch_environment(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that steps an environment: a model called there acts in it and is not evaluated."""

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        p = state.current
        if (
            p is not None
            and type(p.trace) is not Acted
            and not (p.phase_depth or p.data_depth)
            and p.thread == get_ident()
        ):
            p.trace = Acted(p.trace)
        return original(*args, **kwargs)

    return step


def interrupted(p: Progress) -> None:
    """Marks the step in progress as one that may hold an evaluation."""
    if type(p.trace) is list:
        p.trace = Interrupted(p.trace)


def evaluated(
    p: Progress, training: bool, call: Callable[..., Any], args: Any, kwargs: Any, *, graded: bool = False
) -> Any:
    """Calls a model and records the call as one without gradients. Whatever happens inside belongs to this call.

    training: the model is in the mode in which it is trained. graded: a call of another model with gradients; it counts
    as a call without gradients in the other mode, or where no backward pass can start from what it returns.
    """
    if p.data_depth:
        return call(*args, **kwargs)
    timed = training and p.clock is not None and len(p.trace) < _MOST_TIMED
    began, event = now(), device_mark(p) if timed else None
    p.phase_depth += not graded
    try:
        output = call(*args, **kwargs)
    except (RuntimeError, MemoryError) as error:
        if p.investigator is not None:
            p.investigator.passing(error)
        raise
    finally:
        p.phase_depth -= not graded
    if graded and training and _has_gradients(output):
        p.trace.extend((began, event, now(), BESIDE))
        return output
    interrupted(p)
    p.trace.extend((began, now(), training, event, device_mark(p) if timed else None, EVALUATED))
    if len(p.trace) > MOST_ITEMS:  # it evaluates and never trains again: this will never be a step
        shorten(p.trace)
    return output


@guarded
def _has_gradients(output: Any) -> bool:
    """True if a backward pass can start from the output; assumed for one that is no tensor, list, tuple or dict."""
    tensor = sys.modules["torch"].Tensor
    if isinstance(output, tensor):
        return bool(output.requires_grad)
    if not isinstance(output, (tuple, list, dict)):
        return output is not None
    items = output.values() if isinstance(output, dict) else output
    return any(item.requires_grad for item in islice(items, _MOST_OUTPUTS) if isinstance(item, tensor))


not_traced(evaluated)


class _Habit:
    """Learns how many calls without gradients, in training mode and one after another, the steps of a training make.

    A step's own calls are about as many as in the steps before. The many calls of an evaluation stand out, and so do
    those of a step if other steps have none. Up to three times as many as in the steps before count as the step's own
    (at the beginning: three). The model's mode says too little: a teacher is in evaluation mode in every step, and some
    scripts evaluate in training mode.
    """

    __slots__ = ("_over_at", "_seen_at", "_usual")

    def __init__(self) -> None:
        self._seen_at = self._over_at = -_QUIET_STEPS - 1
        self._usual = 1

    def begins(self, step: int) -> None:
        """Sets the step from which such calls are seen: those that begin now are part of the training."""
        self._seen_at = step

    def own_calls(self, step: int, entries: list[Entry]) -> set[int]:
        """Returns the positions of the calls that are the step's own."""
        runs = list(_runs(entries))
        if not runs:
            return set()
        seen, self._seen_at = step - self._seen_at <= _QUIET_STEPS, step
        longest = max(map(len, runs))
        if longest > _STANDS_OUT * self._usual:
            again, self._over_at = step - self._over_at <= _QUIET_STEPS, step
            if again:
                self._usual = longest  # it happens in every step: a rollout
        elif seen:
            self._usual = max(self._usual, longest)
        usual = _STANDS_OUT * self._usual if seen else 0
        own = [run for run in runs if len(run) <= usual or any(entries[place][0] == PHASE for place in run)]
        return {place for run in own for place in run}


def _runs(entries: list[Entry]) -> Iterator[list[int]]:
    """Yields runs of calls without gradients in training mode, and of rollouts, as positions. A run ends at training,
    and at the end of a loader: after an evaluation's loader has ended, a call of a teacher is for the next step."""
    run: list[int] = []
    for place, entry in enumerate(entries):
        if (entry[0] == EVALUATED and entry[3]) or (entry[0] == PHASE and entry[3] == "rollout"):
            run.append(place)
        elif run and (entry[0] in _TRAINS or (entry[0] == FORWARD and entry[3]) or _ends_loader(entry)):
            yield run
            run = []
    if run:
        yield run


def _ends_loader(entry: Entry) -> bool:
    return bool(entry[0] == DATA and entry[3]) and entry[4] is None


def _is_of_another(fed: int, before: list[Entry], fetches: list[Entry]) -> bool:
    """True if the first fetch is from the loader that fed an evaluation, and another loader feeds the training."""
    if not fed or not fetches or fetches[0][3] != fed:
        return False
    return any(entry[0] == DATA and entry[4] is not None and entry[3] != fed for entry in (*before, *fetches))


def _feeds_another(fed: int, waiting: list[Entry]) -> bool:
    """True if the newest fetch is from another loader than the one that fed an evaluation, even if that one is gone and
    the new one has its id: that fetch may feed the next step."""
    fetches = [entry for entry in waiting if entry[0] == DATA]
    return (
        bool(fetches) and fetches[-1][4] is not None and any(entry[4] is None or entry[3] != fed for entry in fetches)
    )


class Evaluations:
    """Finds the evaluations in the traces of one run, step after step. Runs on the sender's thread."""

    __slots__ = ("_acted", "_acts_in_training", "_found", "_habit", "_unseen_at")

    def __init__(self) -> None:
        self._habit = _Habit()
        self._found: list[tuple[str, float]] = []
        self._acted = False  # an environment was stepped in the current trace
        self._acts_in_training = False  # the model acts in training mode; in the other mode it is evaluated
        self._unseen_at = -_QUIET_STEPS - 1

    def usual_from(self, step: int) -> None:
        """Sets the step from which calls without gradients are seen: a few that begin now are the step's
        own. Any thread."""
        self._habit.begins(step)

    def fold(self, p: Progress, step: int, trace: Trace, *, first: bool) -> Trace:
        """Returns the trace with each evaluation as one PHASE entry named "eval" in place of its entries.

        first: it is the run's first step, before which scripts read data for all kinds of reasons.
        """
        self._acted = type(trace) is Acted
        folded = self._folded(p.account, step, self._with_unseen(step, entries_of(trace), first=first))
        self._tell(p, step - 1, step)
        return trace_of(folded)

    def after(self, p: Progress, step: int, trace: Trace) -> float:
        """Returns the seconds of evaluation after the last step. A notebook may go on for hours and call the model now
        and then: calls far apart are not one evaluation."""
        if p.last is not None:
            p.account.trains(entries_of(p.last.trace))  # this trace does not show in which mode the model was trained
        self._acted = type(trace) is Acted
        folded = self._folded(p.account, step + 1, self._with_unseen(step + 1, entries_of(trace)), apart_ns=_APART_NS)
        self._tell(p, step, step)
        spent_ns: int = sum(entry[2] - entry[1] for entry in folded if entry[0] == PHASE and entry[3] == "eval")
        return spent_ns / 1e9

    def _with_unseen(self, step: int, entries: list[Entry], *, first: bool = False) -> list[Entry]:
        """Folds evaluations by models that nobody watches. Those in nearly every step are part of the training: the
        samples of an episode to learn from."""
        found = unseen_evaluations(entries)
        if not found:
            return entries
        own, self._unseen_at = first or step - self._unseen_at <= _QUIET_STEPS, step
        for places in reversed([] if own else found):
            began, ended = entries[places[0]][1], entries[places[-1]][2]
            self._found.insert(0, ("eval", (ended - began) / 1e9))
            entries[places.start : places.stop] = [(PHASE, began, ended, "eval", None, None)]
        return entries

    def _folded(self, account: Account, step: int, entries: list[Entry], *, apart_ns: float = math.inf) -> list[Entry]:
        trains = account.trains(entries)
        own = self._habit.own_calls(step, entries)
        if self._acted and not self._acts_in_training:
            self._acts_in_training = any(entry[0] == EVALUATED and entry[3] for entry in entries)
        folded: list[Entry] = []
        fetches: list[Entry] = []  # since the last call that showed their purpose, with the step's own calls after them
        span: list[int] = []  # began, ended
        fed = 0  # the loader that fed the span
        inside = 0  # calls in evaluation mode with gradients that have not returned
        graded: list[Entry] | None = []  # those calls of the span; None if the span has other calls
        trained = False  # one of the span's calls was in training mode
        for place, entry in enumerate(entries):
            kind = entry[0]
            feeds = kind == DATA and entry[3] == (account.batches.feeding or None)
            if kind == DATA and entry[4] is None:
                account.batches.feeding = 0  # the iterator ended; the next one may get its id
            if kind == DATA and not feeds:
                fetches.append(entry)
            elif kind == PHASE and inside and entry[3] == "compile":
                continue  # of the call that is being evaluated, and part of it
            elif kind == RETURNED and inside:
                inside -= 1
                span[1] = entry[1]
                if graded is not None:
                    graded.append(entry)
            elif kind == EVALUATED and place in own and (not span or _feeds_another(fed, fetches)):
                (fetches or folded).append(entry)
            elif kind == EVALUATED or (kind == FORWARD and trains and not entry[3]):
                began = min([entry[1], *(fetch[1] for fetch in fetches)])
                if span and began - span[1] > apart_ns:
                    folded += self._closed(span, [], self._name(fed, trained=trained))
                    span, graded, trained = [], [], False
                while folded and folded[-1][0] == EVALUATED and folded[-1][1] >= began:
                    folded.pop()  # a call of another model with the same batch
                span = span or [began, began]
                span[1] = entry[2] if kind == EVALUATED else entry[1]
                inside += kind == FORWARD
                if kind == EVALUATED:
                    graded, trained = None, trained or bool(entry[3])
                elif graded is not None:
                    graded += [*fetches, entry]
                fed = next((fetch[3] for fetch in reversed(fetches) if fetch[0] == DATA), fed)
                fetches = []
            else:
                if kind == BACKWARD and span and graded is not None:  # a critic through which its actor learns
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
        the first fetch was one too many from its loader. A fetch that a call without gradients used up before another
        loader was asked belongs to the evaluation: with all that was fetched before a backward pass, a loop that
        evaluates after each step had 13 samples of 8."""
        if not span:
            return fetches
        if fetches and (broke_off or (fetches[0][3] and fetches[0][4] is None)):
            span[1] = fetches.pop(0)[2]  # this fetch met the end of the evaluation's loader; loader 0: a new one begins
        self._found.append((name, (span[1] - span[0]) / 1e9))
        return [(PHASE, span[0], span[1], name, None, None), *fetches]

    def _tell(self, p: Progress, begin_step: int, step: int) -> None:
        for name, seconds in self._found:
            tell(p, name, begin_step, seconds, step, always=False)
        self._found = []


class _AfterLast(StepRow):
    """The trace after the last step, which is read like a step's row once all steps have been read."""

    __slots__ = ()

    def ready(self, p: Progress) -> bool:  # noqa: ARG002 - the signature of a step's
        return True

    def plain(self, p: Progress) -> bool:  # noqa: ARG002 - the signature of a step's
        return False

    def row(self, p: Progress) -> Any:
        """Returns `phase/eval_s` under the last step's number, as a row of log(): without a value it is not stored."""
        seconds = p.account.evaluations.after(p, self.step, self.trace)
        return self.step, self.wall, self.began / 1e9, {"phase/eval_s": seconds} if seconds else {}


def after_last_step(p: Progress) -> None:
    """Adds a row for an evaluation since the last step, when the run ends. Called on the thread that ends the run; a
    second call does nothing.

    A trace so long that its beginning may be gone is ignored.
    """
    trace, p.trace = p.trace, []
    may_hold = isinstance(trace, Interrupted) or any(
        entry[0] == PHASE and entry[3] == "eval" for entry in entries_of(trace)
    )
    if p.last is not None and may_hold and len(trace) < MOST_ITEMS // 3:
        p.rows.append(_AfterLast(p.completed, time.time(), now(), 0, None, None, 0, trace, None))
