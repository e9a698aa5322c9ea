"""A run whose steps come in frames, for rules that judge it step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from judging import START, Judged, frame, restored, state

from perfagent.wire import Event, Finding
from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.rule import Rule
from perfagent_server.store.stored import FromTail

__all__ = ["StepJob"]


class StepJob(Judged):
    """step: the newest one. The server is started again after every `restarts` frames."""

    def __init__(self, *rules: Rule, ranks: int = 1, restarts: int = 7, first: int = 1) -> None:
        super().__init__(rules)
        self.evaluator.start_clock(START)
        self.step = first - 1
        self._ranks, self._restarts, self._frames = ranks, restarts, 0
        for rank in range(ranks if ranks > 1 else 0):
            self._take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=ranks)]))

    def go_on(
        self,
        series: Mapping[str, Sequence[float]],
        *,
        rows: int = 20,
        every: int = 1,
        step_s: float = 0.1,
        measured: Mapping[int, Mapping[str, float]] | None = None,
        events: Mapping[int, Sequence[Event]] | None = None,
    ) -> StepJob:
        """series: columns, a value a step, sent in frames of `rows` steps that lie `every` apart. measured, events: what
        comes with single steps besides."""
        first, length = self.step + every, max(map(len, series.values()))
        for begin in range(0, length, rows):
            steps = [first + every * place for place in range(begin, min(begin + rows, length))]
            piece = {name: list(values[begin : begin + rows]) for name, values in series.items()}
            beside = [(step, measured[step]) for step in steps if measured and step in measured]
            told = [one for step in steps for one in (events or {}).get(step, ())]
            for rank in range(self._ranks):
                stored = frame(piece, steps, rank=rank, ident=self.evaluator.upto + 1, step_s=step_s, events=told)
                for step, values in beside:
                    one = {name: [value] for name, value in values.items()}
                    stored.groups.extend(frame(one, [step], step_s=step_s).groups)
                self._take(stored)
            self.step = steps[-1]
            self.changes += self.evaluator.tick(START + step_s * self.step)
            self._frames += 1
            if self._restarts and self._frames % self._restarts == 0:
                self.evaluator = restored(self.evaluator)
        return self

    @property
    def alert(self) -> Change:
        """The only one, as it fired."""
        [change] = self.fired
        return change

    @property
    def found(self) -> Finding:
        return self.alert.finding

    @property
    def severities(self) -> list[str]:
        """Of what fired."""
        return [change.finding.severity for change in self.fired]

    def _take(self, stored: FromTail) -> None:
        self.changes += self.evaluator.take(stored)
