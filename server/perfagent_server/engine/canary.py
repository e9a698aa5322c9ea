"""A test run that the rules judge every minute: its NaN must raise an alert, or the rules do not work.

Its frames go the way of all others (tail row, evaluator, snapshot, alert machine, rows of the alert and its deliveries),
but no row stays in a table, and nothing comes to a page.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

from perfagent.wire import Group
from perfagent_server.alerts.state_machine import Change
from perfagent_server.database import StorageError
from perfagent_server.database.errors import spell
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.engine.evaluators import PlanOf
from perfagent_server.rules.loss.nonfinite_loss import NonfiniteLoss
from perfagent_server.store.codec.tail import pack_tail, unpack_whole
from perfagent_server.store.stored import FromTail

__all__ = ["EVERY_S", "Canary"]

EVERY_S = 60.0
_LATE_S = 2.5 * EVERY_S
_AGAIN_S = 5.0
_MOST_FAILURES = 3
_RUN = "canary"


class Canary:
    """judge() on the rules thread when it is due. plan_of: the rules of a project; otherwise: those that judge it where all
    projects have the rule that finds it switched off; write: writes the alerts of a run, rolls that back, and says how many
    they were."""

    def __init__(
        self, plan_of: PlanOf, otherwise: PlanOf, now: Callable[[], float], monotonic: Callable[[], float],
        write: Callable[[str, Sequence[Change]], int],
    ) -> None:  # fmt: skip
        self._write = write
        self._plan_of, self._otherwise, self._now, self._monotonic = plan_of, otherwise, now, monotonic
        self._judged = self.due = monotonic()
        self._failures, self._error = 0, ""

    def start(self) -> None:
        self._judged = self.due = self._monotonic()

    def judge(self) -> None:
        try:
            self._error = "" if self._is_told() else "no alert came of it"
        except StorageError:  # the database cannot write for now, which says nothing of the rules
            self._error = ""
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what would befall every run
            self._error = spell(error)
        moment = self._monotonic()
        if self._error:
            self._failures, self.due = self._failures + 1, moment + _AGAIN_S
        else:
            self._failures, self.due, self._judged = 0, moment + EVERY_S, moment

    def trouble(self) -> str:
        """Why the rules cannot be trusted; empty while they can. Of no lock, for any thread."""
        if self._failures >= _MOST_FAILURES:
            return f"the test run with a NaN fails ({self._error})"
        late = self._monotonic() - self._judged
        return f"the test run of every minute was last judged {late:.0f} s ago" if late > _LATE_S else ""

    def _is_told(self) -> bool:
        plan = self._plan_of("", (), ())
        if NonfiniteLoss.id not in plan.rules:
            plan = self._otherwise("", (), ())
        judge = Evaluator(_RUN, plan)
        judge.take(self._frame(1, 2.0))
        judge = Evaluator.restore(judge.snapshot(), plan)
        changes = [change for seq in range(2, 8) for change in judge.take(self._frame(seq, math.nan))]
        fired = [change for change in changes if change.kind == "fire" and change.finding.rule == NonfiniteLoss.id]
        return bool(fired) and self._write(_RUN, fired) == len(fired)

    def _frame(self, seq: int, loss: float) -> FromTail:
        now = self._now()
        time = struct.pack("<d", now)
        row = pack_tail([Group(struct.pack("<q", seq), time, time, {"loss": struct.pack("<d", loss)})], [])
        return FromTail(seq, _RUN, 1, 0, _RUN, seq, now, *unpack_whole(row))
