"""A job whose steps take as long as their phases say, for rules that look at where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from judging import START, Judged, fired, restored, state

from perfagent.wire import Event, Group
from perfagent_server.rules.rule import Rule
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

TICK_S = 5.0


class TimedJob(Judged):
    """now: Unix seconds. The server's clock ticks while a step lasts."""

    def __init__(self, *rules: Rule, ranks: int = 1) -> None:
        super().__init__(rules)
        self.now = START
        self.step = 0
        self._ranks = ranks
        self._ticked = START
        for rank in range(ranks):
            self.send([], rank=rank, events=[state("starting", world_size=ranks)])
        self.evaluator.start_clock(START)

    def train(self, steps: int, phases: dict[str, float], *, others: dict[str, float] | None = None) -> None:
        """Steps of these phases (seconds by name, `forward`). others: the phases of all ranks but 0, if they differ."""
        for _ in range(steps):
            self.step += 1
            self.wait(sum(phases.values()))
            for rank in range(self._ranks):
                self._row(rank, phases if rank == 0 or others is None else others, sum(phases.values()))

    def beside(self, phases: dict[str, float]) -> None:
        """What came after the last step: a row of its own, under its number."""
        self.wait(sum(phases.values()))
        self.tell({f"phase/{name}_s": seconds for name, seconds in phases.items()})

    def read(self, **values: float) -> None:
        """One reading of a sampler each; `gpu__utilization_pct` stands for gpu/utilization_pct."""
        self.send([self._group({name.replace("__", "/"): value}) for name, value in values.items()])

    def tell(self, values: dict[str, float]) -> None:
        """A row under the newest step."""
        self.send([self._group(values)])

    def event(self, kind: str, data: dict[str, Any], *, rank: int = 0) -> None:
        self.send([], rank=rank, events=[Event(kind=kind, time=self.now, data=data, step=self.step)])

    def wait(self, seconds: float) -> None:
        """Time passes, and the server's clock ticks."""
        until = self.now + seconds
        while self._ticked + TICK_S <= until:
            self._ticked += TICK_S
            self.changes += self.evaluator.tick(self._ticked)
        self.now = until

    def restart_server(self) -> None:
        self.evaluator = restored(self.evaluator)

    def finish(self) -> None:
        for rank in range(self._ranks):
            self.send([], rank=rank, events=[Event(kind="state", time=self.now, data={"state": "finished"})])

    def found(self, rule: str) -> list[Any]:
        """What fired of a rule, as it was last told."""
        machine = self.evaluator.machines.get(rule)
        return [machine.finding for _ in fired(self.changes, rule)] if machine is not None else []

    def send(self, groups: Sequence[Group], *, rank: int = 0, events: Sequence[Event] = ()) -> None:
        ident = self.evaluator.upto + 1
        packed = [TailGroup.of_group(group) for group in groups]
        stored = FromTail(ident, "r", 1, rank, f"s{rank}", ident, self.now, packed, list(events))
        self.changes += self.evaluator.take(stored)

    def _row(self, rank: int, phases: dict[str, float], step_s: float) -> None:
        columns = {f"phase/{name}_s": seconds for name, seconds in phases.items() if seconds or name == "other"}
        self.send([self._group(columns | ({"step_time_s": step_s} if self.step > 1 else {}))], rank=rank)

    def _group(self, values: dict[str, float]) -> Group:
        return Group([self.step], [self.now], [self.now], {name: [value] for name, value in values.items()})  # type: ignore[dict-item]
