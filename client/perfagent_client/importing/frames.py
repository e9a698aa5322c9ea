"""Turns an old run into the frames of an import, as docs/reference/wire.md has them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfagent.redaction import redacted, redacted_text
from perfagent.wire import Event, Frame, Group
from perfagent_client.history.endings import ending
from perfagent_client.history.old_run import OldRun
from perfagent_client.history.printed import is_progress
from perfagent_client.importing.attempts import start_step
from perfagent_client.importing.lanes import Lane, lanes

__all__ = ["Destination", "Outgoing", "run_id"]

_SAMPLES = 100_000  # of a frame
_GROUPS = 2_000
_LINES = 200
_EVENTS, _PAYLOAD_BYTES = 500, 2 * 2**20
_JUDGED = "judged"
"""Among what was taken: how many rows there were when the run was judged last."""
_ENDED = "ended"
"""Whether its end was sent."""
_UNSAID = "its files do not say how it ended"


def run_id(run: OldRun, project: str) -> str:
    """The same whenever, and from wherever, this run is read."""
    key = "\n".join((project, run.source, repr(run.started)))
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()[:20]


@dataclass(slots=True)
class Destination:
    """Where a run goes, and what of it is there. live: it goes on, and is judged like one with an agent. written: when its files
    were written last, Unix seconds. seq, taken: as the server has them."""

    import_id: str
    project: str
    group: str
    format: str
    written: float
    live: bool = False
    seq: int = 0
    taken: dict[str, int] = field(default_factory=dict)


Finding = dict[str, Any]
"""As `findings` of an `import` event."""


class Outgoing:
    """What of a run is still to be sent. has_ended: nothing more will come."""

    def __init__(self, run: OldRun, to: Destination, *, has_ended: bool) -> None:
        self._run, self._to, self._has_ended = run, to, has_ended
        self.id = run_id(run, to.project)
        self._lanes = lanes(run, to.written)
        self._rows = sum(lane.rows for lane in self._lanes)
        self._events = {f"{one.attempt}/{one.rank}/events": one.events for one in run.processes}

    @property
    def samples(self) -> int:
        """That are still to be sent."""
        return sum((lane.rows - self._taken(lane)) * len(lane.group.values) for lane in self._lanes)

    @property
    def is_complete(self) -> bool:
        if self.samples:
            return False
        taken = self._to.taken
        return taken.get(_JUDGED) == self._rows or (self._to.live and taken.get(_ENDED, 0) == self._has_ended)

    def _taken(self, lane: Lane) -> int:
        return min(lane.rows, self._to.taken.get(lane.key, 0))

    def frames(self, judge: Callable[[], Sequence[Finding]]) -> Iterator[Frame]:
        """judge: called once, before the last frame."""
        told = {(one.attempt, one.rank) for one in self._run.processes}
        everyone = sorted({(lane.attempt, lane.rank) for lane in self._lanes} | told) or [(1, 0)]
        for of in everyone:
            for groups in self._cut([lane for lane in self._lanes if (lane.attempt, lane.rank) == of]):
                yield self._frame(of, groups, [])
            for events in self._told(of):
                yield self._frame(of, [], events)
        findings = None
        if not self._to.live:
            findings, self._to.taken[_JUDGED] = list(judge()), self._rows
        self._to.taken[_ENDED] = int(self._has_ended)
        *others, last = [of for of in everyone if of[0] == everyone[-1][0]]
        for of in others if self._has_ended else ():
            yield self._frame(of, [], [self._end()])
        yield self._frame(last, [], [*self._lines(), *([self._end()] if self._has_ended else [])], findings)

    def _cut(self, its: Sequence[Lane]) -> Iterator[list[Group]]:
        """Some rows of each lane at a time, so that a run that is half here is whole up to some step."""
        share = max(1, _SAMPLES // max(1, min(len(its), _GROUPS)))
        while left := [lane for lane in its if self._taken(lane) < lane.rows]:
            for first in range(0, len(left), _GROUPS):
                groups = []
                for lane in left[first : first + _GROUPS]:
                    at = self._taken(lane)
                    end = min(lane.rows, at + share)
                    groups.append(lane.cut(at, end))
                    self._to.taken[lane.key] = end
                yield _joined(groups)

    def _told(self, of: tuple[int, int]) -> Iterator[list[Event]]:
        """What a process said itself, in pieces of some megabytes."""
        key = f"{of[0]}/{of[1]}/events"
        its = self._events.get(key, [])
        while at := its[self._to.taken.get(key, 0) :]:
            size, piece = 0, []
            for event in at[:_EVENTS]:
                size += len(payload) if isinstance(payload := event.data.get("payload"), bytes) else 0
                piece.append(event)
                if size > _PAYLOAD_BYTES:
                    break
            self._to.taken[key] = self._to.taken.get(key, 0) + len(piece)
            yield piece

    def _frame(
        self, of: tuple[int, int], groups: list[Group], events: list[Event], findings: list[Finding] | None = None
    ) -> Frame:
        attempt, rank = of
        begun = f"{attempt}/{rank}"
        if not self._to.taken.get(begun):
            events = [*self._begin(attempt, rank), *events]
            self._to.taken[begun] = 1
        self._to.seq += 1
        said = {"import": self._to.import_id, "taken": dict(self._to.taken), "findings": findings}
        events.append(Event(kind="import", time=self._ended, data=said))
        kind = "follow" if self._to.live else "import"
        return Frame(
            project=self._to.project, run=self.id, name=redacted_text(self._run.name)[:256], attempt=attempt, rank=rank,
            source=f"{kind}-{self.id}-{attempt}-{rank}", seq=self._to.seq, groups=groups, events=events, sent=time.time(),
        )  # fmt: skip

    @property
    def _started(self) -> float:
        times = [
            *(lane.group.times()[0] for lane in self._lanes),
            *(one.time for its in self._events.values() for one in its),
        ]
        return min(
            (at for at in (self._run.started, *times) if at is not None and math.isfinite(at)), default=self._to.written
        )

    @property
    def _ended(self) -> float:
        if self._run.ended is not None and math.isfinite(self._run.ended):
            return self._run.ended
        return max((lane.group.times()[-1] for lane in self._lanes), default=self._to.written)

    def _begin(self, attempt: int, rank: int) -> Iterator[Event]:
        run = self._run
        steps = [
            step for lane in self._lanes if (lane.attempt, lane.rank) == (attempt, rank) for step in lane.group.steps()
        ]
        about = {
            "name": run.name, "config": run.config, "tags": run.tags, "group": run.group or self._to.group, "notes": run.notes,
            "world_size": 1 + max((lane.rank for lane in self._lanes), default=0),
        }  # fmt: skip
        said = {
            "state": "starting",
            "heartbeat": False,
            "start_step": start_step(steps) if steps else 0,
            **redacted(about),
        }
        yield Event(kind="state", time=self._started, data=said)
        origin = {
            "import": self._to.import_id,
            "format": self._to.format,
            "source": run.source,
            "left_out": run.left_out,
        }
        yield Event(kind="context", time=self._started, data=redacted({**run.meta, "imported": origin}))

    def _lines(self) -> Iterator[Event]:
        lines = [redacted_text(line)[:500] for line in self._run.console[-_LINES:]]
        if lines and not self._to.taken.get("console"):
            self._to.taken["console"] = 1
            yield Event(kind="log", time=self._ended, data={"lines": lines, "stream": "stdout"})

    def _end(self) -> Event:
        """What the console says of it counts before what the tracker noted."""
        how = ending(self._run.console, is_progress)
        if how is not None:
            said = {"state": how.state, "reason": how.reason, "exception": how.exception, "traceback": how.traceback}
        elif self._run.state in ("finished", "failed"):
            said = {"state": self._run.state}
        else:
            said = {"state": "finished", "reason": _UNSAID}
        return Event(kind="state", time=self._ended, data=redacted(said))


def _joined(groups: Sequence[Group]) -> list[Group]:
    """Groups that share their steps and times are one."""
    alike: dict[tuple[bytes, bytes], dict[str, bytes]] = {}
    apart = []
    for group in groups:
        values = alike.setdefault((group.step, group.time), {})
        if values.keys() & group.values.keys():
            apart.append(group)
        else:
            values.update(group.values)
    return [Group(step, at, at, values) for (step, at), values in alike.items()] + apart
