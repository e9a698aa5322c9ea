"""Holds what all inquiries of a run share: the run's parts, the newest rows, and tasks that wait for the end of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from perfagent.boundary.guard import guarded
from perfagent.step.state import now
from perfagent.step.stop import Stop

if TYPE_CHECKING:
    from torch import nn

    from perfagent.delivery.sender import Sender
    from perfagent.step.state import StepState
    from perfagent.wire.evidence import BatchTensor

__all__ = ["Task", "Watch"]

_BAD_STEPS = 8
"""So many steps with gradients that are no numbers are remembered by name."""
_KEPT = ("loss", "grad/norm", "grad/nonfinite", "lr", "amp/scale", "amp/skipped", "step_time_s")


class Task(Protocol):
    """Something to do on the training thread between two steps."""

    def at_boundary(self) -> bool:
        """True to be called again after the next step."""


class Watch:
    """The losses and findings of one run. model: gives the root module, or None while it is not known. clock: the
    one by which steps end (step/state.py), in seconds."""

    history_steps = 32

    def __init__(
        self, progress: StepState, sender: Sender, model: Callable[[], nn.Module | None], clock: Callable[[], float]
    ) -> None:
        self.progress, self.sender, self.model, self.clock = progress, sender, model, clock
        self.stop = Stop(progress)
        self.set_sample_period: Callable[[float], None] | None = None
        self.judged_upto = -1  # the newest step whose row was read
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=self.history_steps)
        self._bad: deque[tuple[int, list[str], list[str], list[BatchTensor]]] = deque(maxlen=_BAD_STEPS)
        self._bad_step = -1  # the newest one that was looked into
        self._watchful = True  # False from a bad step on until a good one: what follows a NaN is its consequence
        self._incoming: deque[Task] = deque()
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        """Has a task called on the training thread after the step in progress. Any thread."""
        self._incoming.append(task)
        self.progress.boundary = self.boundary

    def boundary(self) -> None:
        """A step is complete and something waits for that. The time it takes belongs to no step."""
        p = self.progress
        p.boundary = None  # first: what is added from here on sets it again
        while self._incoming:
            self._tasks.append(self._incoming.popleft())
        self._tasks = [task for task in self._tasks if _run(task)]
        if self._tasks:
            p.boundary = self.boundary
        p.step_end = now()

    def report(
        self, rule: str, explains: list[str], step: int, evidence: Mapping[str, object], more: Callable[[], Mapping[str, object]]
    ) -> None:  # fmt: skip
        """Sends a finding. more: gives what is added to its evidence when it is sent, on the sender's thread."""

        def data() -> dict[str, Any]:
            whole = {**evidence, **(guarded(more)() or {})}
            return {"rule": rule, "explains": explains, "severity": "critical", "since_step": step, "evidence": whole}

        self.sender.event("finding", data, step=step)

    # ---- on the sender's thread

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """The row of a step was read."""
        self._recent.append((step, values))
        self.judged_upto = step

    def history(self) -> list[dict[str, float]]:
        """The newest steps, oldest first, as {"step", "loss", "grad/norm", "lr", ...} with what was known of each. Any
        thread."""
        known = dict([*self._recent])
        return [
            {"step": step, **{name: values[name] for name in _KEPT if name in values}}
            for step, values in [*known.items()][-self.history_steps :]
        ]

    @property
    def is_bad(self) -> bool:
        """Whether the newest loss that was judged is no number. Any thread."""
        return not self._watchful

    def stays_bad(self, first: int) -> bool:
        """Whether losses from this step on that are no numbers are the consequence of one that is known."""
        return not self._watchful and first > self._bad_step

    def witnessed(
        self, step: int, names: list[str], among: Sequence[str] = (), inputs: Sequence[BatchTensor] = ()
    ) -> None:
        """The parameters whose gradient held NaN or infinity in a step that the optimizer took, and what the model was
        called with that did. Those of the steps after one that is looked into are its consequence. among: the parameters
        that were looked at, if not all were."""
        if (names or inputs) and (self._watchful or step <= self._bad_step):
            self._bad.append((step, names, [*among], [*inputs]))

    def bad_gradients(self, step: int) -> tuple[list[str], list[str]]:
        """(bad parameters, all that were measured) of that step; ([], []) if none. Any thread."""
        return next(((names, among) for at, names, among, _ in [*self._bad] if at == step and names), ([], []))

    def bad_inputs(self, step: int) -> list[BatchTensor]:
        """What the model was called with in that step that held NaN or +inf. Any thread."""
        return next((inputs for at, _, _, inputs in [*self._bad] if at == step and inputs), [])


@guarded
def _run(task: Task) -> bool:
    return task.at_boundary()
