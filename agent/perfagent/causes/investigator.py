"""Receives what the hooks report as wrong, and the server's commands. Light: what it calls is imported at first use.

Two threads meet here. The training thread calls `suspect` (a loss that is no number), `passing` (an exception on its
way through a hook) and, at the end of a step, whatever tasks are waiting: the hooks test one attribute,
`StepState.boundary`, which is None unless there are any. The sender's thread calls `judged`, `pressing`, `obey` and
`poll`. They exchange deque appends and assignments.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.causes.standstill import Standstill
from perfagent.causes.watch import Watch
from perfagent.process.exit_reason import chain_of, out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from perfagent.causes.commands import Commands
    from perfagent.causes.nonfinite import Inquiry
    from perfagent.delivery.row_packing import Packed
    from perfagent.delivery.sender import Sender
    from perfagent.step.state import StepState

__all__ = ["Investigator"]

MOST_INQUIRIES = 3
"""Bad steps of one run that are looked into."""
MOST_OOMS = 3
"""Failed allocations that are looked into while training catches them; later ones are counted. The one that ends it
always is."""
SETTLED_S = 1.0
"""A logged loss that is not finite is looked into when so much has passed: till then the step itself may tell more
exactly."""
PAUSE_S = 5.0
"""So long after a look was begun, what is logged is of the same event."""
_LAST_ROWS = 64
_NUMBERS = (4, 5)
"""Items in a row that a user logged, and in one with a tuple of names (delivery/handoff.py)."""
_REPORTED = "_perfagent_reported"
_AT = "_perfagent_at"
"""How many steps were completed when memory ran out."""


class Investigator(Watch):
    """One run's."""

    def __init__(
        self, progress: StepState, sender: Sender, model: Callable[[], nn.Module | None], *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        super().__init__(progress, sender, model, clock)
        self._ooms = 0  # allocations that failed
        self._inquiry: Inquiry | None = None
        # the same, also when the finding is sent: the row of its step may come later
        self._newest: Inquiry | None = None
        self._inquiries = 0
        self._opened_at = -math.inf
        self._bad_logged: tuple[float, int] | None = None  # when it was seen, and the step in progress then
        self._commands: Commands | None = None
        self._standstill = Standstill(self)
        self._began = self.clock()

    # ---- on the training thread

    def suspect(self, loss: torch.Tensor | None) -> bool:
        """Backward is about to start from a loss on the CPU that is NaN or infinite; or, with None, such a loss has come
        from a device before the update of its step. Returns whether that is news: the first such step since a good one."""
        if not self._watchful:
            return False
        self._bad_step = self.progress.completed + 1  # first: the other thread judges older, sound steps meanwhile
        self._watchful = False
        if self._is_free:
            self._open(self._bad_step, lambda one: one.before_update() if loss is None else one.before_backward(loss))
        return True

    def passing(self, error: BaseException) -> None:
        """An exception passes through a hook, which raises it again. Nothing is imported for one that is not about memory:
        at exit, after Ctrl-C, an import would change the exit code."""
        self._passing(error, MOST_OOMS)

    def ended_by(self, error: BaseException) -> None:
        """Like `passing`, for the exception that ends the run. Also looks for a non-finite loss in its frames."""
        self._passing(
            next(filter(out_of_memory, chain_of(error)), error), None
        )  # `raise ValueError("failed") from error`
        if isinstance(error, Exception) and error.__traceback__ is not None and self._wants_look():  # see `passing`
            self._look_behind(error.__traceback__)

    def is_past(self, error: BaseException) -> bool:
        """Whether memory had run out, and the training went on."""
        return vars(error).get(_AT, self.progress.completed) < self.progress.completed  # type: ignore[no-any-return]

    def left_from(self, frame: FrameType) -> None:
        """Like `ended_by`, for a function that calls sys.exit with a status that means failure."""
        if self._wants_look():
            self._look_behind(frame)

    @guarded
    def _look_behind(self, where: TracebackType | FrameType) -> None:
        """The shortest of guards: `if not torch.isfinite(loss): raise ...`, before any backward pass."""
        from perfagent.causes.variables import bad_loss_in

        loss, frame = bad_loss_in(where)
        if loss is not None:
            self._open(self.progress.completed + 1, lambda one: one.before_backward(loss, frame), at_end=True)

    @guarded
    def _passing(self, error: BaseException, most: int | None) -> None:
        if not out_of_memory(error):
            return
        # Several hooks see it on its way out. To hold it would hold its frames, with all the tensors in them.
        reported: bool | None = vars(error).get(_REPORTED)
        if reported is None:
            self._ooms += 1
            BaseException.__setattr__(error, _AT, self.progress.completed)  # past a `__setattr__` of its own
        is_new = not reported and (most is None or self._ooms <= most)
        BaseException.__setattr__(error, _REPORTED, bool(reported or is_new))
        if is_new:
            from perfagent.causes.oom import forensics

            forensics(self, error, self._ooms)

    # ---- on the sender's thread

    def judged(self, step: int, values: Mapping[str, float]) -> None:
        """The values of a completed step, those of a device included, in the order of steps."""
        self.note(step, values)
        loss = values.get("loss", 0.0)
        if loss - loss == 0.0 and not values.get("grad/nonfinite"):
            if "loss" in values and not self._watchful and step > self._bad_step:  # rows come later than their steps
                self._watchful = True
        elif self._watchful and self._is_free:
            self._watchful = False
            # the gradients of the next step
            self.progress.measure_at = min(self.progress.measure_at, self.progress.completed)
            self._open(step)
        elif self._inquiry is not None and step < self._inquiry.step and loss - loss != 0.0:
            self._inquiry.began_earlier(step)
        if self._newest is not None and self._newest.step == step:
            # of a fast training, what follows has pushed it out by the time of the report
            self._newest.history = self.history()

    @guarded
    def pressing(self, taken: Sequence[Packed]) -> None:
        """Among these rows something is not finite: perhaps the logged loss of a step whose backward pass a guard left out."""
        from perfagent.delivery.row_packing import is_finite, rows_in

        rows = chain.from_iterable(rows_in(block) for block in taken if not is_finite(block))
        if self._wants_look() and any(map(_logs_bad_loss, rows)):
            self._bad_logged = self._bad_logged or (self.clock(), self.progress.completed + 1)

    def obey(self, command: Mapping[str, Any]) -> None:
        """A command of the server's reply."""
        if self._commands is None:
            from perfagent.causes.commands import Commands

            self._commands = Commands(self)
        self._commands.obey(command)

    def poll(self) -> None:
        """Every tick: sends what is known by now."""
        inquiry = self._inquiry
        if inquiry is not None and inquiry.send_if_ready():
            self._inquiry = None
        if self._bad_logged is not None and self.clock() - self._bad_logged[0] >= SETTLED_S:
            step, self._bad_logged = self._bad_logged[1], None
            if self._wants_look():
                self._watchful = False
                self._open(step)
        if self._commands is not None:
            self._commands.poll()
        p = self.progress
        since = p.step_end / 1e9 or self._began
        self._standstill.poll(p.step_end, 0.0 if p.links.ended else self.clock() - since)

    @property
    def _is_free(self) -> bool:
        return self._inquiry is None and self._inquiries < MOST_INQUIRIES

    def _wants_look(self) -> bool:
        return self._watchful and self._is_free and self.clock() - self._opened_at > PAUSE_S

    # ---- the end

    @guarded
    def close(self) -> None:
        """The run ends. On the thread that ends it; nothing is waited for."""
        if self._inquiry is None:
            self._begin_at_end()
        self.progress.boundary = None
        if self._inquiry is not None:
            self._inquiry.give_up()
        if self._commands is not None:
            self._commands.close()

    @guarded
    def _begin_at_end(self) -> None:
        """A guard may log a loss that is no number and leave before any backward pass: its row may be in the deque yet."""
        if not self._wants_look() or isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):  # see `passing`
            return
        logged = self._bad_logged
        if logged is not None or any(map(_logs_bad_loss, [*self.sender.rows][-_LAST_ROWS:])):
            self._open(logged[1] if logged is not None else self.progress.completed + 1)

    @guarded
    def _open(self, step: int, look: Callable[[Inquiry], None] = lambda _: None, *, at_end: bool = False) -> None:
        from perfagent.causes.nonfinite import Inquiry

        inquiry = Inquiry(self, step, at_end=at_end)
        look(inquiry)
        self._opened_at = self.clock()
        self._inquiries += 1
        self._bad_step = step
        self._inquiry = self._newest = inquiry
        self.add(inquiry)


def _logs_bad_loss(row: Any) -> bool:
    """Whether a row of numbers holds a loss that is not finite. Rows of steps are judged elsewhere."""
    if type(row) is not tuple or len(row) not in _NUMBERS:
        return False
    named = row[3].items() if isinstance(row[3], dict) else zip(row[3], row[4], strict=False)
    bad = [name for name, value in named if type(value) is float and not math.isfinite(value) and isinstance(name, str)]
    if not bad:
        return False
    from perfagent.wire.loss_names import loss_kind

    return any(loss_kind(name) == "whole" for name in bad)
