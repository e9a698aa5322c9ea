"""Evaluation between steps: by a framework's own loop, or seen from calls of the root model that no backward pass can follow.

A plain loop is recognised afterwards, on the sender's thread, from the order of what was noted: calls of the root model without
gradients, and calls in evaluation mode, together with the fetches from the loader that feeds them, are one span from the first
of them to the last. Calls without gradients in training mode count only as an interruption: what every step does (a rollout,
the generator's samples for a discriminator) is part of the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfagent.hooks.account import DATA, EVALUATED, FORWARD, PHASE, RETURNED, Entry
from perfagent.hooks.checkpoint import Patch, replace_when_imported
from perfagent.hooks.guard import not_traced
from perfagent.hooks.phases import tell, watch_phase
from perfagent.hooks.progress import Progress, now

__all__ = ["EVALUATORS", "Evaluations", "evaluated", "install", "interrupted"]

EVALUATORS: dict[str, tuple[str, ...]] = {
    "transformers.trainer": ("Trainer.evaluate", "Trainer.predict"),
    "lightning.pytorch.loops.evaluation_loop": ("_EvaluationLoop.run",),
    "pytorch_lightning.loops.evaluation_loop": ("_EvaluationLoop.run",),
}
_MOST_ENTRIES = 100_000
_QUIET_STEPS = 2


def install(patch: Patch, when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Watches the frameworks' evaluation loops, each when it is imported."""
    replace_when_imported(EVALUATORS, watch_phase("eval"), patch, when_imported)


class Interrupted(list[Entry]):
    """A trace that may hold an evaluation: its type says so, since no trace of an ordinary step is to be searched for one."""


def interrupted(p: Progress) -> None:
    """The step in progress may hold an evaluation."""
    if type(p.trace) is list:
        p.trace = Interrupted(p.trace)


def evaluated(p: Progress, training: bool, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of the root model without gradients, noted when it returns. training: the model's mode."""
    began = now()
    output = call(*args, **kwargs)
    interrupted(p)
    p.trace.append((EVALUATED, began, now(), training))
    if len(p.trace) > _MOST_ENTRIES:  # it evaluates and never trains again: nothing of this will be a step
        del p.trace[: _MOST_ENTRIES // 2]
    return output


not_traced(evaluated)


class Evaluations:
    """Finds the evaluations in the traces of one run, step after step. On the sender's thread."""

    __slots__ = ("_found", "_usual_at")

    def __init__(self) -> None:
        self._usual_at = -_QUIET_STEPS
        """The last step with calls that had no gradients although the model was in training mode."""
        self._found: list[float] = []

    def fold(self, p: Progress, step: int, trace: list[Entry]) -> list[Entry]:
        """The trace with each evaluation as one entry (PHASE, began, ended, "eval"), and without what it consists of."""
        account = p.account
        trains = account.trains(trace)
        usual = step - self._usual_at <= _QUIET_STEPS
        if any(entry[0] == EVALUATED and entry[3] for entry in trace):
            self._usual_at = step
        folded: list[Entry] = []
        fetches: list[Entry] = []  # since the last call that told what they were for
        span: list[int] = []  # began, ended
        inside = 0  # calls in evaluation mode with gradients that have not returned
        for entry in trace:
            kind = entry[0]
            if kind == DATA and entry[4] is None:
                account.feeding = 0  # an iterator that ended; the next one may get its id
            if kind == DATA and entry[3] != (account.feeding or None):
                fetches.append(entry)
            elif kind == RETURNED and inside:
                inside -= 1
                span[1] = entry[1]
            elif (kind == EVALUATED and not (usual and entry[3])) or (kind == FORWARD and trains and not entry[3]):
                began = min([entry[1], *(fetch[1] for fetch in fetches)])
                span = span or [began, began]
                span[1] = entry[2] if kind == EVALUATED else entry[1]
                inside += kind == FORWARD
                fetches = []
            elif kind != EVALUATED:
                if span and fetches and fetches[0][4] is None:  # the fetch that found the evaluation's loader at its end
                    span[1] = fetches.pop(0)[2]
                folded += [*self._closed(span), *fetches, entry]
                span, fetches, inside = [], [], 0
        folded += [*self._closed(span), *fetches]
        for seconds in self._found:
            tell(p, "eval", step - 1, seconds, step, always=False)
        self._found = []
        return folded

    def _closed(self, span: list[int]) -> list[Entry]:
        if not span:
            return []
        self._found.append((span[1] - span[0]) / 1e9)
        return [(PHASE, span[0], span[1], "eval")]
