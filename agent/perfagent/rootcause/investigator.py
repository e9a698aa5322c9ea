"""Where the hooks report what is wrong, and where the server's commands arrive. Light: what it calls is imported at first use.

Two threads meet here. The training thread calls `suspect` (a loss that is no number), `passing` (an exception on its way through
a hook) and, at the end of a step, whatever tasks are waiting: the hooks test one attribute, `Progress.boundary`, which is None
unless there are any. The sender's thread calls `judged`, `obey` and `poll`. They exchange deque appends and assignments.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from perfagent.hooks.progress import now
from perfagent.rootcause.containment import contained

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender
    from perfagent.hooks.progress import Progress
    from perfagent.rootcause.commands import Commands
    from perfagent.rootcause.nonfinite import Inquiry

__all__ = ["Investigator", "Task", "out_of_memory"]

MOST_INQUIRIES = 3
"""Bad steps of one run that are looked into; a run that needs a fourth look has been told three times."""
STEP_AGE_S = 5.0
"""From this age on, the time since the last step is sent once a second; a training that moves sends none of it."""
_AGE = ("step_age_s",)
_KEPT = ("loss", "grad/norm", "grad/nonfinite", "lr", "amp/scale", "amp/skipped", "step_time_s")


class Task(Protocol):
    """Something to do on the training thread between two steps."""

    def at_boundary(self) -> bool:
        """True to be called again after the next step."""


class Investigator:
    """One run's. model: gives the root module, or None while it is not known."""

    history_steps = 32

    def __init__(self, progress: Progress, sender: Sender, model: Callable[[], Any]) -> None:
        self.progress, self.sender, self.model = progress, sender, model
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=self.history_steps)
        self._unfolded: Callable[[], list[tuple[int, Mapping[str, float]]]] | None = None  # what came last; see judged_sound
        self.set_sample_period: Callable[[float], None] | None = None
        self._told_oom = 0  # id() of the exception that was looked into: it passes through several hooks on its way out
        self._incoming: deque[Task] = deque()
        self._tasks: list[Task] = []
        self._inquiry: Inquiry | None = None
        self._inquiries = 0
        self._bad_step = -1  # the newest one that was looked into
        self._watchful = True  # False from a bad step on until a good one: what follows a NaN is its consequence
        self._commands: Commands | None = None
        self._age_told = 0.0

    # ---- on the training thread

    def suspect(self, tensor: Any) -> None:
        """Backward is about to start from a value on the CPU that is NaN or infinite."""
        if self._watchful and self._inquiries < MOST_INQUIRIES:
            self._suspect(tensor)

    @contained
    def _suspect(self, tensor: Any) -> None:
        from perfagent.rootcause.nonfinite import Inquiry

        self._watchful = False
        inquiry = Inquiry(self, self.progress.completed + 1)
        inquiry.before_backward(tensor)
        self._open(inquiry)

    def passing(self, error: BaseException) -> None:
        """An exception passes through a hook, or ended the process. Whoever calls raises it again, unchanged.

        Nothing is imported for one that is not about memory: at exit, after Ctrl-C, an import would change the exit code.
        """
        if self._told_oom != id(error) and out_of_memory(error):
            self._told_oom = id(error)
            self._forensics(error)

    @contained
    def _forensics(self, error: BaseException) -> None:
        from perfagent.rootcause.oom import forensics

        forensics(self, error)

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

    # ---- on the sender's thread

    def add(self, task: Task) -> None:
        """Has a task called on the training thread after the step in progress. Any thread."""
        self._incoming.append(task)
        self.progress.boundary = self.boundary

    def judged(self, step: int, values: Mapping[str, float]) -> None:
        """The values of a completed step, those of a device included, in the order of steps."""
        self._fold()
        self._recent.append((step, values))
        loss = values.get("loss", 0.0)
        if loss - loss == 0.0 and not values.get("grad/nonfinite"):
            if "loss" in values and not self._watchful and step > self._bad_step:  # rows come later than what they tell of
                self._watchful = True
        elif self._watchful and self._inquiries < MOST_INQUIRIES:
            from perfagent.rootcause.nonfinite import Inquiry

            self._watchful = False
            self.progress.measure_at = min(self.progress.measure_at, self.progress.completed)  # the gradients of the next step
            self._open(Inquiry(self, step))

    def judged_sound(
        self, steps: Sequence[int], names: Sequence[str], newest: Callable[[], list[tuple[int, Mapping[str, float]]]]
    ) -> None:
        """The same for many steps in none of which anything is wrong. newest: gives the last `history_steps` of them, on any
        thread; called only when somebody asks for them, or when fewer steps follow."""
        if len(steps) < self.history_steps:
            self._fold()
        self._unfolded = newest
        self._watchful = self._watchful or ("loss" in names and steps[-1] > self._bad_step)

    def _fold(self) -> None:
        newest = self._unfolded
        if newest is not None:
            self._recent.extend(newest())
            self._unfolded = None  # last: a thread that asks meanwhile finds a step twice, never not at all

    def obey(self, command: Mapping[str, Any]) -> None:
        """A command of the server's reply."""
        if self._commands is None:
            from perfagent.rootcause.commands import Commands

            self._commands = Commands(self)
        self._commands.obey(command)

    def poll(self) -> None:
        """Every tick: tells what is known by now."""
        inquiry = self._inquiry
        if inquiry is not None and inquiry.tell_if_ready():
            self._inquiry = None
        if self._commands is not None:
            self._commands.poll()
        self._tell_age()

    def _tell_age(self) -> None:
        """The heartbeat of steps, apart from that of the process: while none ends, how long that has been so."""
        p = self.progress
        age = (now() - p.step_end) / 1e9 if p.step_end and not p.ended else 0.0
        if age >= STEP_AGE_S and age - self._age_told >= 1.0:
            self._age_told = age
            p.rows.append((p.completed, time.time(), time.monotonic(), _AGE, (age,)))
        elif age < STEP_AGE_S:
            self._age_told = 0.0

    def history(self) -> list[dict[str, float]]:
        """The newest steps, oldest first, as {"step", "loss", "grad/norm", "lr", ...} with what was known of each. Any thread."""
        newest = self._unfolded
        known = dict([*self._recent, *(newest() if newest is not None else ())])
        return [
            {"step": step, **{name: values[name] for name in _KEPT if name in values}}
            for step, values in [*known.items()][-self.history_steps :]
        ]

    def at_step(self, step: int) -> dict[str, float]:
        """What is known of a step: from the history, the step itself or the last one before it."""
        before = [entry for entry in self.history() if entry["step"] <= step]
        return before[-1] if before else {}

    # ---- the end

    @contained
    def close(self) -> None:
        """The run ends. On the thread that ends it; nothing is waited for."""
        self.progress.boundary = None
        if self._inquiry is not None:
            self._inquiry.give_up()
        if self._commands is not None:
            self._commands.close()

    def _open(self, inquiry: Inquiry) -> None:
        self._inquiries += 1
        self._bad_step = inquiry.step
        self._inquiry = inquiry
        self.add(inquiry)


def out_of_memory(error: BaseException) -> bool:
    """Whether the exception itself says that memory ran out: CUDA's own type, Python's, or the words of torch's allocators."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"OutOfMemoryError", "MemoryError"}:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


@contained
def _run(task: Task) -> bool:
    return task.at_boundary()
