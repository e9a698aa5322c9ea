"""Evaluation between steps: by a framework's own loop, or seen from calls of the root model that no backward pass can follow.

A plain loop is recognised afterwards, on the sender's thread, from the order of what was noted: calls of the root model without
gradients, and calls in evaluation mode, together with the fetches from the loader that feeds them, are one span from the first
of them to the last. Calls without gradients in training mode count only as an interruption: what every step does (a rollout,
a teacher's answer, the generator's samples for a discriminator) is part of the training, and of its forward pass. What a model
is asked that nobody watches is told by its loader (unseen.py).

Where an environment was stepped meanwhile, the model was asked what to do there: that is a rollout, a phase of its own. So
is what a language model writes in training mode.

An evaluation is part of the step that follows it. What follows the last step is told when the run ends, in a row of its own.
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
from perfagent.hooks.checkpoint_saves import Patch, replace_when_imported
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
    "ENVIRONMENTS", "EVALUATORS", "GENERATORS", "Evaluations", "after_last_step", "evaluated", "install", "interrupted",
]  # fmt: skip

EVALUATORS: dict[str, tuple[str, ...]] = {
    "transformers.trainer": ("Trainer.evaluate", "Trainer.predict"),
    "lightning.pytorch.loops.evaluation_loop": ("_EvaluationLoop.run",),
    "pytorch_lightning.loops.evaluation_loop": ("_EvaluationLoop.run",),
    "stable_baselines3.common.evaluation": ("evaluate_policy",),
    "ultralytics.engine.validator": ("BaseValidator.__call__",),
}
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "gymnasium.wrappers.common": ("OrderEnforcing.step",),  # which `gymnasium.make` puts round nearly everything
    "gymnasium.vector.sync_vector_env": ("SyncVectorEnv.step",),
    "gymnasium.vector.async_vector_env": ("AsyncVectorEnv.step",),
    "gym.wrappers.order_enforcing": ("OrderEnforcing.step",),
    "stable_baselines3.common.vec_env.base_vec_env": ("VecEnv.step",),
}
"""What steps an environment: a model that is asked there acts in it, and is not evaluated."""
GENERATORS: dict[str, tuple[str, ...]] = {"transformers.generation.utils": ("GenerationMixin.generate",)}
"""What asks a model for one token after the other. In training mode it writes what the next steps learn from: a rollout."""
_QUIET_STEPS = 2
_STANDS_OUT = 3
"""So many times what the steps of a training do is something else."""
_MOST_OUTPUTS = 8
_TRAINS = (BACKWARD, BACKWARD_END, BESIDE, OPTIMIZER, OPTIMIZER_END)
_MOST_TIMED = 400
"""Items of a trace up to which the device's clock times such calls: an evaluation is timed by the host."""
_APART_NS = 60 * 10**9


def install(patch: Patch, when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Watches the frameworks' evaluation loops, each when it is imported."""
    replace_when_imported(EVALUATORS, watch_phase("eval"), patch, when_imported)
    replace_when_imported(ENVIRONMENTS, _watch_environment, patch, when_imported)
    replace_when_imported(GENERATORS, _watch_generation, patch, when_imported)


def _watch_generation(original: Callable[..., Any]) -> Callable[..., Any]:
    rollout = watch_phase("rollout")(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        writes = getattr(self, "training", False)  # others than torch's models have this method, too
        return (rollout if writes else original)(self, *args, **kwargs)

    return generate


class Interrupted(list[Any]):
    """A trace that may hold an evaluation: its type says so, since no trace of an ordinary step is to be searched for one."""


class Acted(Interrupted):
    """One in which an environment was stepped: what would be an evaluation without a loader is a rollout."""


def _watch_environment(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        p = state.current
        if p is not None and type(p.trace) is not Acted and not (p.phase_depth or p.data_depth) and p.thread == get_ident():
            p.trace = Acted(p.trace)
        return original(*args, **kwargs)

    return step


def interrupted(p: Progress) -> None:
    """The step in progress may hold an evaluation."""
    if type(p.trace) is list:
        p.trace = Interrupted(p.trace)


def evaluated(p: Progress, training: bool, call: Callable[..., Any], args: Any, kwargs: Any, *, graded: bool = False) -> Any:
    """A call of a model without gradients, noted when it returns; what happens in it is part of it.

    training: the root is in that mode, or another model in the one that it has in training. graded: another model with gradients:
    it is such a call all the same in another mode, or where nothing that it returns has any.
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
    if len(p.trace) > MOST_ITEMS:  # it evaluates and never trains again: nothing of this will be a step
        shorten(p.trace)
    return output


@guarded
def _has_gradients(output: Any) -> bool:
    """Whether a backward pass can start from it: of what is no tensor, list or dict it is believed."""
    tensor = sys.modules["torch"].Tensor
    if isinstance(output, tensor):
        return bool(output.requires_grad)
    if not isinstance(output, (tuple, list, dict)):
        return output is not None
    items = output.values() if isinstance(output, dict) else output
    return any(item.requires_grad for item in islice(items, _MOST_OUTPUTS) if isinstance(item, tensor))


not_traced(evaluated)


class _Habit:
    """How many calls without gradients, in training mode and one after the other, the steps of a training make.

    A step's own are as many as in the steps before, give or take; the many of an evaluation stand out, and so do those of a step
    where there are none else.
    """

    __slots__ = ("_over_at", "_seen_at", "_usual")

    def __init__(self) -> None:
        self._seen_at = self._over_at = -_QUIET_STEPS - 1
        self._usual = 1

    def begins(self, step: int) -> None:
        """From here on such calls are seen: what begins now is the training's own."""
        self._seen_at = step

    def own_calls(self, step: int, entries: list[Entry]) -> set[int]:
        """Places of the calls that are the step's own."""
        runs = list(_runs(entries))
        if not runs:
            return set()
        seen, self._seen_at = step - self._seen_at <= _QUIET_STEPS, step
        longest = max(map(len, runs))
        if longest > _STANDS_OUT * self._usual:
            again, self._over_at = step - self._over_at <= _QUIET_STEPS, step
            if again:
                self._usual = longest  # in every step: a rollout
        elif seen:
            self._usual = max(self._usual, longest)
        usual = _STANDS_OUT * self._usual if seen else 0
        own = [run for run in runs if len(run) <= usual or any(entries[place][0] == PHASE for place in run)]
        return {place for run in own for place in run}


def _runs(entries: list[Entry]) -> Iterator[list[int]]:
    """Places of the calls without gradients in training mode, and of rollouts, together where no training lies in between, and no
    end of a loader: behind that of an evaluation, what a teacher is asked is for the next step."""
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
    """Whether the first of these fetches is of the loader that fed an evaluation, while another one feeds the training."""
    if not fed or not fetches or fetches[0][3] != fed:
        return False
    return any(entry[0] == DATA and entry[4] is not None and entry[3] != fed for entry in (*before, *fetches))


def _feeds_another(fed: int, waiting: list[Entry]) -> bool:
    """Whether the newest of these fetches is of another loader than the one that fed an evaluation, also where that one is gone
    and its id is the new one's: what it feeds may be the next step's."""
    fetches = [entry for entry in waiting if entry[0] == DATA]
    return bool(fetches) and fetches[-1][4] is not None and any(entry[4] is None or entry[3] != fed for entry in fetches)


class Evaluations:
    """Finds the evaluations in the traces of one run, step after step. On the sender's thread."""

    __slots__ = ("_acted", "_acts_in_training", "_found", "_habit", "_unseen_at")

    def __init__(self) -> None:
        self._habit = _Habit()
        self._found: list[tuple[str, float]] = []
        self._acted = False  # an environment was stepped in the trace that is read
        self._acts_in_training = False  # the model acts in training mode: in the other one it is evaluated
        self._unseen_at = -_QUIET_STEPS - 1

    def usual_from(self, step: int) -> None:
        """From here on calls without gradients are seen: few that begin now are what each step does. Any thread."""
        self._habit.begins(step)

    def fold(self, p: Progress, step: int, trace: Trace, *, first: bool) -> Trace:
        """The trace with each evaluation as one PHASE entry of the name "eval", and without what it consists of.

        first: it is the run's first step, before which data is read for all kinds of reasons.
        """
        self._acted = type(trace) is Acted
        folded = self._folded(p.account, step, self._with_unseen(step, entries_of(trace), first=first))
        self._tell(p, step - 1, step)
        return trace_of(folded)

    def after(self, p: Progress, step: int, trace: Trace) -> float:
        """Seconds of the evaluations in what follows the last step. A notebook may go on for hours then, asking the model now and
        again: what is far apart is not one evaluation."""
        if p.last is not None:
            p.account.trains(entries_of(p.last.trace))  # nothing in this trace tells how the model was trained
        self._acted = type(trace) is Acted
        folded = self._folded(p.account, step + 1, self._with_unseen(step + 1, entries_of(trace)), apart_ns=_APART_NS)
        self._tell(p, step, step)
        spent_ns: int = sum(entry[2] - entry[1] for entry in folded if entry[0] == PHASE and entry[3] == "eval")
        return spent_ns / 1e9

    def _with_unseen(self, step: int, entries: list[Entry], *, first: bool = False) -> list[Entry]:
        """What each step does, or nearly, is part of the training: the samples that an episode is given to learn from."""
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
        fetches: list[Entry] = []  # since the last call that told what they were for, and calls of each step's own behind them
        span: list[int] = []  # began, ended
        fed = 0  # the loader that fed it
        inside = 0  # calls in evaluation mode with gradients that have not returned
        graded: list[Entry] | None = []  # those calls of the span; None where not all of it are such
        trained = False  # one of the span's calls was in training mode
        for place, entry in enumerate(entries):
            kind = entry[0]
            feeds = kind == DATA and entry[3] == (account.batches.feeding or None)
            if kind == DATA and entry[4] is None:
                account.batches.feeding = 0  # an iterator that ended; the next one may get its id
            if kind == DATA and not feeds:
                fetches.append(entry)
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
                    folded.pop()  # another model's, of the same batch
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
                if kind == BACKWARD and span and graded is not None:  # a critic in that mode, through which its actor learns
                    folded += [*graded, *fetches, entry]
                else:
                    name, broke_off = self._name(fed, trained=trained), _is_of_another(fed, folded, fetches)
                    folded += [*self._closed(span, fetches, name, broke_off=broke_off), entry]
                span, fetches, inside, fed, graded, trained = [], [], 0, 0, [], False
        folded += self._closed(span, fetches, self._name(fed, trained=trained), broke_off=_is_of_another(fed, folded, fetches))
        return folded

    def _name(self, fed: int, *, trained: bool) -> str:
        """Of what is folded. fed: the loader that fed it, or 0."""
        return "rollout" if self._acted and not fed and (trained or not self._acts_in_training) else "eval"

    def _closed(self, span: list[int], fetches: list[Entry], name: str, *, broke_off: bool = False) -> list[Entry]:
        """An evaluation that is over, and the fetches behind it. broke_off: the first of those was one too many of its loader."""
        if not span:
            return fetches
        if fetches and (broke_off or (fetches[0][3] and fetches[0][4] is None)):
            span[1] = fetches.pop(0)[2]  # the one that found the evaluation's loader at its end; 0: another one begins
        self._found.append((name, (span[1] - span[0]) / 1e9))
        return [(PHASE, span[0], span[1], name, None, None), *fetches]

    def _tell(self, p: Progress, begin_step: int, step: int) -> None:
        for name, seconds in self._found:
            tell(p, name, begin_step, seconds, step, always=False)
        self._found = []


class _AfterLast(StepRow):
    """What came after the last step: read like a step's row, once all steps were read."""

    __slots__ = ()

    def ready(self, p: Progress) -> bool:  # noqa: ARG002 - as that of a step
        return True

    def plain(self, p: Progress) -> bool:  # noqa: ARG002 - as that of a step
        return False

    def row(self, p: Progress) -> Any:
        """`phase/eval_s` under the last step's number. As a row of log(): of those, one without a value is stored nowhere."""
        seconds = p.account.evaluations.after(p, self.step, self.trace)
        return self.step, self.wall, self.began / 1e9, {"phase/eval_s": seconds} if seconds else {}


def after_last_step(p: Progress) -> None:
    """The run ends: an evaluation since its last step becomes a row. On the thread that ends it; a second time does nothing.

    A trace so long that its beginning may be gone says nothing.
    """
    trace, p.trace = p.trace, []
    may_hold = isinstance(trace, Interrupted) or any(entry[0] == PHASE and entry[3] == "eval" for entry in entries_of(trace))
    if p.last is not None and may_hold and len(trace) < MOST_ITEMS // 3:
        p.rows.append(_AfterLast(p.completed, time.time(), now(), 0, None, None, 0, trace, None))
