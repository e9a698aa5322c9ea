"""One moment of a run that is judged afterwards: what one rank reported then."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from perfagent.wire import Event
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail

__all__ = ["Moment"]

_STEP, _NUMBER = struct.Struct("<q"), struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Moment:
    """time: Unix seconds; values: series -> value of the step."""

    time: float
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    rank: int = 0
    attempt: int = 1

    def frame(self, number: int, received: float) -> FromTail:
        """As though an agent had sent it by itself. number: of the frame, from 1; received: Unix seconds."""
        groups = []
        if self.values:
            columns = {name: _NUMBER.pack(value) for name, value in self.values.items()}
            groups.append(TailGroup.of(_STEP.pack(self.step), _NUMBER.pack(self.time), columns))
        source = f"{self.attempt}-{self.rank}"
        return FromTail(number, "backtest", self.attempt, self.rank, source, number, received, groups, [*self.events])
