"""The messages about delivery that a user sees, one line and once for each topic: what is wrong, where the samples are
meanwhile, what to do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.boundary.agent_log import logger
from perfagent.delivery import console_alarms
from perfagent.local_server import stopped_server
from perfagent.plural import some

if TYPE_CHECKING:
    from collections import Counter

    from perfagent.delivery.columns import Columns
    from perfagent.delivery.handoff import Sender
    from perfagent.delivery.spool import Spool
    from perfagent.delivery.transport import Answer
    from perfagent.wire import Event

__all__ = ["Notices", "damage"]

TELL_AGAIN_S = 600.0
"""On a bad line a server comes and goes all the time; that is told so often."""
COUNT_AGAIN_S = 60.0
"""A script that logs a new name at every step leaves out one more each time."""


class Notices:
    """Those of one sender."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._unreachable_at = 0.0
        self._left_out = 0
        self._left_out_due = 0.0

    def _what(self) -> str:
        """What the folder is to the user: one that he named, or ours."""
        return "the spool" if self._sender.config.record is None else "the recording"

    def _warn(self, topic: str, message: str, level: int = logging.WARNING) -> None:
        self._sender.tell(topic, level, f"perfagent: {message}")

    # ---- samples

    def overflow(self) -> None:
        self._warn("overflow", "rows came faster than they could be stored; the oldest were dropped")

    def event_overflow(self) -> None:
        self._warn(
            "event overflow", "alerts and other events came faster than they could be stored; the oldest were dropped"
        )

    def refused(self, columns: Columns) -> None:
        """Values that were logged and cannot be stored; counts them, and forgets them in `columns`."""
        refused: Counter[str] = columns.refused
        for reason, count in refused.items():
            self._sender.counters[f"refused_{reason}"] += count
        if refused["series"] and "series" not in self._sender.told:
            self._warn(
                "series",
                f"a run may have {columns.max_series:,} series beside the agent's own; samples of further names are left out, "
                f"the first of {columns.left_out[0]!r:.80}. Log fewer names",
            )
        if refused["kind"]:
            self._warn(
                "kind",
                "some logged values are no numbers and were left out (text, None, complex, arrays); the first of them was "
                f"{columns.no_number}",
            )
        if refused["step"]:
            self._warn("step", "some logged steps are beyond 64 bits; what was logged for them is left out")
        if refused["name"]:
            self._warn("name", "some logged values have no name and were left out; a name is text of 1 to 256 bytes")
        refused.clear()
        self.left_out(columns)
        for kind, sentence in columns.renamed.items():
            self._warn(kind, sentence)

    def left_out(self, columns: Columns, *, last: bool = False) -> None:
        """Sends how many names had no room, where they have become more."""
        count, now = columns.left_out_count, time.monotonic()
        if count > self._left_out and (last or now >= self._left_out_due):
            self._left_out, self._left_out_due = count, now + COUNT_AGAIN_S
            told = {"limit": columns.max_series, "names": [*columns.left_out], "count": count}
            self._sender.event("left_out", told)

    def rejected(self, item: Mapping[str, Any], *, ours: bool) -> None:
        """The first reason for which the server left out samples or events of a frame that it took otherwise; the rest
        is counted. ours: they are of this run, not of what an earlier process left."""
        name, reason = (_line(item.get(key)) for key in ("name", "reason"))
        self._warn(
            "rejected",
            f"the server left out {name or 'a series'} ({reason or 'it gives no reason'}); "
            + (
                "all that is left out is counted in agent/dropped"
                if ours
                else "an earlier process had left them in the spool"
            ),
        )

    def quarantined(self, reason: str, place: Path | None) -> None:
        """place: None where there was no room left."""
        where = f"set aside in {place}" if place is not None else "dropped, the quarantine is full"
        self._warn("quarantine", f"the server refused samples ({reason}); they were {where}")

    def lost(self, samples: int, events: int) -> None:
        what = " and ".join(some(count, kind) for count, kind in ((samples, "sample"), (events, "event")) if count)
        self._warn("lost", f"{what} {'is' if samples + events == 1 else 'are'} lost: {self._what()} cannot be written")

    def left(self, frames: int, size: int, *, by_next_run: bool) -> None:
        """At the end, when not all was delivered: frames that wait, of so many bytes on the disk. by_next_run: whether
        another process may send it, which it may not for a rank that never learned which run it is of."""
        much, config = f"{some(frames, 'frame')} ({max(1, size >> 10):,} KiB)", self._sender.config
        there = f" --server {config.server}" if config.is_server_given else ""
        later = "; so does the next run here that sends to this server, within a week" if by_next_run else ""
        self._warn(
            "left",
            f"not all of this run has reached server {config.server}: {much} kept in {self._sender.folder}. "
            f"`perfagent sync{there}` sends it{later}",
        )

    # ---- the training

    def moved(self) -> None:
        """Its page is another one than was printed at the start."""
        config, run = self._sender.config, self._sender.identity.run
        self._warn("moved", f"the training continues run {run}: {config.server}/run/{run}")

    def alarms(self, events: Iterable[Event]) -> None:
        """A NaN, memory that ran out, a crash: in the job's own console, with the place to look at."""
        p, identity, record = self._sender.progress, self._sender.identity, self._sender.config.record
        step = 0 if p is None else p.completed or p.logged_at() or 0
        for event in events:
            found = console_alarms.alarm(event.kind, event.data, step)
            if found is None:
                continue
            rank = f"rank {identity.rank}: " if identity.world_size > 1 else ""
            where = (
                f"{self._sender.config.server}/run/{identity.run}"
                if identity.run
                else f"server {self._sender.config.server}"
            )
            see = f"See {where}" if record is None else f"Recorded in {record}; `perfagent sync {record}` sends it"
            self._warn(f"alarm {found[0]}", f"{rank}{found[1]} {see}", logging.ERROR)

    # ---- disk and threads

    def disk(self, error: OSError) -> None:
        room = self._sender.config.max_memory_bytes >> 20
        cause = error.strerror or str(error)
        self._warn(
            "disk",
            f"{self._what()} {self._sender.folder} cannot be written ({cause}); keeping up to {room} MiB in memory",
        )

    def damaged(self, spool: Spool) -> None:
        """What could not be read of the files of an earlier process, whose other samples were sent."""
        if found := damage(spool):
            self._warn(
                f"damaged {spool.folder}",
                f"what an earlier process left in {spool.folder} was sent in part only{found}",
            )

    def source_off(self, name: str, error: str) -> None:
        self._warn(f"source {name}", f"{name} failed three times and is off: {error}")

    def stuck(self, name: str) -> None:
        self._warn("stuck", f"{name} does not return; off until it does")

    def no_courier(self, why: str) -> None:
        self._warn("courier", f"no thread for the network ({why}), recording to {self._sender.folder}; will retry")

    def command_failed(self, error: Exception) -> None:
        self._warn("command", f"a command of the server failed: {type(error).__name__}: {error}")

    def no_mirror(self, error: Exception) -> None:
        why = f"perfagent: nothing more is written for TensorBoard: {error}; the run itself goes on"
        self._sender.tell("mirror", logging.WARNING, why)

    # ---- the server

    def reachable(self, now: float, *, again: bool) -> None:
        """It answered; again: after failures."""
        if again:
            logger.info("perfagent: server %s reachable again", self._sender.config.server)
        if now - self._unreachable_at >= TELL_AGAIN_S:
            self._sender.told.discard("unreachable")

    def undelivered(self, answer: Answer, now: float) -> None:
        """An answer that means to try later."""
        server, meanwhile = self._sender.config.server, f"recording to {self._sender.folder}"
        if answer.kind == "unauthorized":
            self._warn(
                "unauthorized",
                f"server {server} refused the key ({answer.reason}): set PERFAGENT_API_KEY to a key with the ingest scope; "
                f"{meanwhile} meanwhile",
                logging.ERROR,
            )
        elif answer.kind == "foreign":
            self._warn(
                "foreign", f"what answers at {server} is no perfagent server ({answer.reason}), {meanwhile}; will retry"
            )
        elif answer.kind == "retry" and answer.reason.startswith("status"):
            self._warn("busy", f"server {server} is busy ({answer.reason}), {meanwhile}; will retry")
        else:
            self._unreachable_at = self._unreachable_at if "unreachable" in self._sender.told else now
            stopped = stopped_server(server)
            more = f" ({stopped})" if stopped else ""
            self._warn(
                "unreachable", f"server {server} unreachable ({_line(answer.reason)}), {meanwhile}; will retry{more}"
            )


def damage(spool: Spool) -> str:
    """What could not be read of a source; empty where all could."""
    text = ""
    if damaged := spool.counters["corrupt"]:
        kept = ", ".join(path.name for path in sorted(spool.folder.glob("*.corrupt")))
        where = f"; what could not be read is in {spool.folder}: {kept}" if kept else ""
        text += f"; {some(damaged, 'file')} damaged{where}"
    if unread := spool.counters["unreadable"]:
        text += f"; {some(unread, 'file')} could not be read ({spool.error or 'an error of the disk'})"
    if gone := spool.counters["dropped"]:
        text += f"; {some(gone, 'sample')} could not be read back"
    return text


def _line(text: Any) -> str:
    """What came from elsewhere, short enough for a line that says more."""
    found = " ".join(str(text or "").split())
    return found if len(found) <= 200 else found[:199] + "…"
