"""Recognizes evaluations between steps, by a framework's own loop or by calls of the root model without backward.

A plain loop is recognized later, on the sender's thread (decode/evaluation_spans.py). Calls without gradients in training
mode count only as an interruption: what every step does (a rollout, a teacher's answer) is part of the training. If an
environment was stepped in the same span, or a language model generated text in training mode, that is a rollout, a phase of
its own.

An evaluation is part of the step that follows it; one after the last step has a row of its own.
"""

from __future__ import annotations

import functools
import sys
from itertools import islice
from threading import get_ident
from typing import Any

from perfagent.boundary.call_watch import before
from perfagent.boundary.dynamo import Function, not_traced
from perfagent.boundary.guard import guarded
from perfagent.hooks.phases import device_mark, watch_phase
from perfagent.step.row import AfterLastStep
from perfagent.step.state import StepState, now, state
from perfagent.step.trace import AUXILIARY, EVALUATED, MOST_ITEMS, PHASE, EvalTrace, RolloutTrace, entries_of, shorten

__all__ = [
    "after_last_step", "evaluated", "interrupted", "watch_environment", "watch_generation",
]  # fmt: skip

_MOST_OUTPUTS = 8
_MOST_TIMED = 400
"""Items of a trace up to which the device's clock times such calls; later ones (an evaluation) are timed
by the host."""


def watch_generation(original: Function) -> Function:
    """Wraps a method that asks a model for one token after another. In training mode that is a rollout."""
    rollout = watch_phase("rollout")(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        writes = getattr(self, "training", False)  # models that are not torch's have this method, too
        return (rollout if writes else original)(self, *args, **kwargs)

    return generate


def _acts(*_: object, **__: object) -> None:
    p = state.current
    if p is None or type(p.trace) is RolloutTrace or p.phase_depth or p.data_depth or p.thread != get_ident():
        return
    p.trace = RolloutTrace(p.trace)


watch_environment = before(_acts)
"""Wraps a method that steps an environment: a model called there acts in it and is not evaluated."""


def interrupted(p: StepState) -> None:
    """Marks the step in progress as one that may hold an evaluation."""
    if type(p.trace) is list:
        p.trace = EvalTrace(p.trace)


def evaluated(p: StepState, training: bool, call: Function, args: Any, kwargs: Any, *, graded: bool = False) -> Any:
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
        p.links.investigator.passing(error)
        raise
    finally:
        p.phase_depth -= not graded
    if graded and training and _has_gradients(output):
        p.trace.extend((began, event, now(), AUXILIARY))
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


def after_last_step(p: StepState) -> None:
    """Adds a row for an evaluation since the last step, when the run ends. Called on the thread that ends the run; a
    second call does nothing.

    A trace so long that its beginning may be gone is ignored.
    """
    trace, p.trace = p.trace, []
    may_hold = isinstance(trace, EvalTrace) or any(
        entry[0] == PHASE and entry[3] == "eval" for entry in entries_of(trace)
    )
    if p.last is not None and may_hold and len(trace) < MOST_ITEMS // 3:
        p.rows.append(AfterLastStep(p.completed, now(), 0, None, trace, None))
