"""Takes media out of the logged values. The sender's thread encodes each one and sends it as an event.

Nothing here may delay a step, a sample or an alarm: so little is encoded in a tick, so much waits, and so much of a frame
and of the spool is theirs. What does not fit is left out, counted (`dropped_media`, and reported to the server) and said once.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.delivery.columns import clean_name
from perfagent.media.values import Media

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Source
    from perfagent.delivery.sender import Sender
    from perfagent.step.pending_logs import EarlyLog

__all__ = ["Outbox"]

MOST_OF_CALL = 100
"""Items of one name in one log()."""
WAITING_BYTES, WAITING_ITEMS = 64 * 2**20, 2000
"""Most that may wait, as copies in host or device memory."""
FRAME_BYTES = 3 * 2**20
"""Most bytes of media in a frame, of the 8 MiB that the server accepts."""
RUN_BYTES, RUN_ITEMS = 2 * 2**30, 20_000
"""After so much, every second call of a name is dropped, then three of four."""
SPOOL_SHARE = 4
"""While the server is away, media may have a quarter of the spool: samples are worth more."""
TICK_S, CLOSING_SHARE = 0.02, 0.4
"""Seconds of encoding in a tick; share of the time left at the end of the run."""
TELL_S = 30.0


class _Waiting(NamedTuple):
    """place: in its list; step: a call stands for its own, as long as that is not known."""

    name: str
    place: int
    media: Media
    step: int | EarlyLog

    @property
    def known_step(self) -> int | None:
        return self.step if isinstance(self.step, int) else self.step.step


class Outbox:
    """The media of one process. source: polled while there is something to do."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.source: Source | None = None
        self.waiting: deque[_Waiting] = deque()
        self._added_bytes = self._sent_bytes = 0
        """Bytes of copies; each is counted by one thread alone."""
        self._calls: Counter[str] = Counter()
        self._taken_items = self._taken_bytes = 0
        self._left_out: Counter[int] = Counter()
        """By thread, for the same reason."""
        self._told = 0
        self._tell_at = 0.0

    # ---- on the training thread

    def take_out(self, values: dict[str, Any]) -> dict[str, list[Media]]:
        """The media among what is logged, which stay in it no longer."""
        found = {name: media for name, value in values.items() if (media := _media_of(value))}
        for name in found:
            del values[name]
        return found

    def add(self, found: dict[str, list[Media]], step: int | EarlyLog) -> None:
        """step: a number, or the call that will have it."""
        rarer = 1 << max(self._taken_items // RUN_ITEMS, self._taken_bytes // RUN_BYTES)
        too_many = (
            f"this process has logged {RUN_ITEMS:,} media, or {RUN_BYTES >> 30} GiB of them: of each name, one log() in {rarer} "
            "keeps its media from now on"
        )
        for key, media in found.items():
            name = clean_name(key)
            if name is None:
                self._leave_out("name", "media need a name of 1 to 256 bytes; left out", len(media))
                continue
            self._calls[name] += 1
            if (self._calls[name] - 1) % rarer:
                self._leave_out(f"run {rarer}", too_many, len(media))
                continue
            if len(media) > MOST_OF_CALL:
                sentence = f"{name!r:.80} has {len(media)} items in one log(); the first {MOST_OF_CALL} are kept"
                self._leave_out("call", sentence, len(media) - MOST_OF_CALL)
            for place, one in enumerate(media[:MOST_OF_CALL]):
                self._add(_Waiting(name, place, one, step))
        self._poll_again()

    def _add(self, item: _Waiting) -> None:
        media = item.media
        for name in media.left_out:
            sentence = f"perfagent: {type(media).__name__}() has no argument {name!r}; it is left out"
            self._sender.tell(f"argument {media.kind} {name}", logging.WARNING, sentence)
        if media.problem:
            self._leave_out(media.problem[:40], f"{item.name!r:.80}: {media.problem}; left out")
        elif len(self.waiting) >= WAITING_ITEMS or self._added_bytes - self._sent_bytes + media.nbytes > WAITING_BYTES:
            sentence = "media come faster than they can be sent; log fewer, or smaller ones; some are left out"
            self._leave_out("fast", sentence)
        else:
            self._added_bytes += media.nbytes
            self._taken_items += 1
            self.waiting.append(item)

    def _poll_again(self) -> None:
        if self.source is not None:
            self.source.due = self._sender.sources_due = 0.0

    # ---- on the sender's thread

    def poll(self) -> None:
        sender, closing_at, now = self._sender, self._sender.closing_at, self._sender.clock()
        closing = closing_at is not None
        takes_all = closing or sender.config.record is not None
        began, until = time.thread_time(), now + (TICK_S if closing_at is None else CLOSING_SHARE * (closing_at - now))
        while self.waiting and sender.clock() < until and (takes_all or sender.spool.pending_bytes < FRAME_BYTES):
            item = self.waiting[0]
            if item.known_step is None or not item.media.ready():
                if not closing:
                    break
                time.sleep(0.005)  # a copy takes milliseconds to come from its device
                continue
            self.waiting.popleft()
            self._sent_bytes += item.media.nbytes
            self._send(item)
        if closing and self.waiting:
            self._leave_out("end", "the run ended before all its media were sent; some are left out", len(self.waiting))
            self.waiting.clear()
        total, now = self._total, time.monotonic()
        if total > self._told and (closing or now >= self._tell_at):
            self._told, self._tell_at = total, now + TELL_S
            sender.event("media", {"left_out": total})
        if self.source is not None:
            self.source.due = math.inf
            if self.waiting or self._total > self._told:  # also what was added meanwhile
                self._poll_again()
        sender.asked_cpu_s += time.thread_time() - began

    def _send(self, item: _Waiting) -> None:
        config, spool = self._sender.config, self._sender.spool
        if spool.error is not None or (config.record is None and spool.on_disk > config.max_spool_bytes // SPOOL_SHARE):
            self._leave_out("spool", "the spool has no room for media while the server is away: they are left out")
            return
        try:
            payload = item.media.encoded()
        except Exception as error:  # noqa: BLE001 - it cannot be made to fit, its device was lost, or memory ran out
            self._leave_out("encoding", f"{item.name!r:.80} cannot be sent: {type(error).__name__}: {error}; left out")
            return
        self._taken_bytes += len(payload)
        data = {"name": item.name, "what": item.media.kind, "index": item.place, "payload": payload}
        data |= {"caption": item.media.caption} if item.media.caption else {}
        self._sender.event("media", data, step=item.known_step)

    def _leave_out(self, topic: str, sentence: str, count: int = 1) -> None:
        self._left_out[get_ident()] += count
        self._sender.counters["dropped_media"] = self._total
        self._sender.tell(f"media {topic}", logging.WARNING, f"perfagent: {sentence}")

    @property
    def _total(self) -> int:
        return sum([*self._left_out.values()])


def _media_of(value: Any) -> list[Media]:
    listed = value if type(value) in (list, tuple) else [value]
    return [one.frozen() for one in listed] if all(isinstance(one, Media) for one in listed) else []
