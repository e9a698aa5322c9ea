"""A run whose readings go on for minutes or hours, for the rules that judge them by the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from judging import START, Judged, restored, state

from perfagent.wire import Event, Finding, Group
from perfagent_server.rules.rule import Rule
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

Readings = Callable[[float], Mapping[str, float]]
"""Names and values, by the seconds since the run began."""
FIRST_STEP_S = 3.0


class Job(Judged):
    """A run that sends a frame every few seconds. steps: how many had ended, by the seconds since it began."""

    def __init__(self, *rules: Rule, steps: Callable[[float], float], ranks: int = 1, every_s: float = 1.0) -> None:
        super().__init__(rules)
        self.now_s = 0.0
        self._steps, self._ranks, self._every_s, self._done = steps, ranks, every_s, 0
        self._tick_at, self._restart_at = 0.0, 500.0
        for rank in range(ranks):
            self._send(rank, [], events=[state("starting", world_size=ranks)])

    def go_on(
        self, seconds: float, *readings: Readings, logged: Mapping[int, Mapping[str, float]] | None = None
    ) -> Job:
        """readings: of each rank; of rank 0 for all where there is one. logged: what the script logs, by step. Every
        eight minutes the server is started again."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s += self._every_s
            step = int(self._steps(self.now_s))
            for rank in range(self._ranks):
                values = readings[min(rank, len(readings) - 1)](self.now_s) if readings else {}
                self._send(rank, self._groups(step, values, logged or {}))
            self._done = max(self._done, step)
            if self.now_s >= self._tick_at:
                self._tick_at = self.now_s + 3.0
                self.changes += self.evaluator.tick(START + self.now_s)
            if self.now_s >= self._restart_at:
                self._restart_at += 500.0
                self.evaluator = restored(self.evaluator)
        return self

    @property
    def found(self) -> Finding:
        """The only one, as it fired."""
        [change] = self.fired
        return change.finding

    @property
    def told(self) -> list[tuple[str, str]]:
        """Severity and cause of what fired."""
        return [(change.finding.severity, change.finding.cause) for change in self.fired]

    @property
    def now_open(self) -> list[tuple[str, str]]:
        """Severity and cause of the findings that are open."""
        return [(one.severity, one.cause) for one in self.evaluator.findings()]

    def _groups(
        self, step: int, values: Mapping[str, float], logged: Mapping[int, Mapping[str, float]]
    ) -> list[TailGroup]:
        at, groups = [START + self.now_s], []
        if step > self._done:
            steps = list(range(max(self._done + 1, step - 3), step + 1))
            took = [0.1] * len(steps)
            groups.append(_group(steps, at * len(steps), {"step_time_s": took}))
        groups += [
            _group([one], at, {name: [value] for name, value in logged[one].items()})
            for one in range(self._done + 1, step + 1)
            if one in logged
        ]
        if values:
            groups.append(_group([step], at, {name: [value] for name, value in values.items()}))
        return groups

    def _send(self, rank: int, groups: Sequence[TailGroup], events: Sequence[Event] = ()) -> None:
        ident = self.evaluator.upto + 1
        frame = FromTail(ident, "r", 1, rank, f"s{rank}", ident, START + self.now_s, list(groups), list(events))
        self.changes += self.evaluator.take(frame)


def every(step_s: float) -> Callable[[float], float]:
    """Steps of that length, from FIRST_STEP_S on."""
    return lambda seconds: max(0.0, (seconds - FIRST_STEP_S) / step_s)


def _group(steps: Sequence[int], times: Sequence[float], values: Mapping[str, Sequence[float]]) -> TailGroup:
    columns = {name: list(column) for name, column in values.items()}
    return TailGroup.of_group(Group(list(steps), list(times), list(times), columns))  # type: ignore[arg-type]
