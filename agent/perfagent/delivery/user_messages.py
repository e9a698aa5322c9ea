"""Messages on a job's own console, one line and once a topic: of calls that cannot be meant so, of delivery, of a NaN, of
memory that ran out, of a crash. None of it raises: a slip in a loop must not end a training.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import logger
from perfagent.endpoint.local_server import stopped_server
from perfagent.wire.quantities import some

if TYPE_CHECKING:
    from perfagent.delivery.columns import Columns
    from perfagent.delivery.handoff import Handoff
    from perfagent.delivery.spool import Spool
    from perfagent.delivery.transport import Answer, LeftOut
    from perfagent.wire import Event

__all__ = ["Messages", "alarm", "damage"]

TELL_AGAIN_S = 600.0
"""On a bad line a server comes and goes all the time; that is said so often."""
COUNT_AGAIN_S = 60.0
"""A script that logs a new name at every step leaves out one more each time."""
_NAMED = ("batch_tensor", "buffer", "parameter", "module", "after_module", "before_module")
"""Fields of a NaN's evidence that name its place: the console says the first that is known."""

TEXTS: dict[str, str] = json.loads(Path(__file__).with_name("messages.json").read_text(encoding="utf-8"))
"""Topic -> what is said of it, with the names of its figures."""


class Messages:
    """Messages of one process. on: training thread (calls) and sender thread (the rest)."""

    def __init__(self, handoff: Handoff) -> None:
        self._handoff = handoff
        self._unreachable_at = self._left_out_due = 0.0
        self._left_out = 0

    def warn(self, topic: str, kind: str = "", *, level: int = logging.WARNING, **more: object) -> None:
        """The text of a topic, once for each `kind` of it. more: the figures in the text."""
        handoff, config = self._handoff, self._handoff.config
        if not config.disabled:
            what = "the spool" if config.record is None else "the recording"  # ours, or a folder that the user named
            text = TEXTS[topic].format(**{"server": config.server, "folder": handoff.folder, "what": what, **more})
            handoff.tell(f"{topic} {kind}".rstrip(), level, f"perfagent: {text}")

    # ---- calls

    def no_metrics(self, given: object) -> None:
        """log() of what is no dict."""
        example = f"{{{given!r:.60}: value}}" if isinstance(given, str) else "{'loss': value}"
        self._not_logged("metrics", type(given).__name__, given, example)

    def no_step(self, step: object) -> None:
        """log() with a step that no series can have."""
        self._not_logged("log step", "negative" if isinstance(step, int) and step < 0 else type(step).__name__, step)

    def _not_logged(self, topic: str, kind: str, given: object, example: str = "") -> None:
        counters = self._handoff.counters
        counters["refused_log_calls"] = counters.get("refused_log_calls", 0) + 1
        shown = f"a value of type {type(given).__name__:.80}"  # the text of a tensor would wait for its device
        if given is None or type(given) in (str, bytes, int, float, bool):
            shown = repr(given[:80] if isinstance(given, (str, bytes)) else given)[:90]
        self.warn(topic, kind, given=shown, example=example)

    def phase_name(self, name: str) -> str:
        """The name that a phase gets: of letters, digits, `_`, `-` and `.`, as part of the name of a series."""
        kept = "".join(letter if letter.isalnum() or letter in "_-." else "_" for letter in name)
        if kept != name:
            self.warn("phase", name, name=name, kept=kept)
        return kept

    # ---- samples

    def refused(self, columns: Columns, *, last: bool = False) -> None:
        """Values that were logged and cannot be stored; counts them, and forgets them in `columns`. Sends how many names
        had no room, where they have become more."""
        for reason, refused in columns.refused.items():
            self._handoff.counters[f"refused_{reason}"] += refused
            first = columns.left_out[0] if reason == "series" else columns.no_number
            self.warn(reason, most=columns.max_series, first=first)
        columns.refused.clear()
        if columns.renamed is not None:
            self.warn("renamed", key=repr(columns.renamed[0])[:60], name=columns.renamed[1])
            columns.renamed = None
        count, now = columns.left_out_count, time.monotonic()
        if count > self._left_out and (last or now >= self._left_out_due):
            self._left_out, self._left_out_due = count, now + COUNT_AGAIN_S
            data = {"limit": columns.max_series, "names": [*columns.left_out], "count": count}
            self._handoff.event("left_out", data)

    def rejected(self, item: LeftOut, *, ours: bool) -> None:
        """The first reason for which the server left something out of a frame. ours: of this run."""
        name, reason = _line(item.name) or "a series", _line(item.reason) or "it gives no reason"
        counted = "all that is left out is counted in agent/dropped"
        then = counted if ours else "an earlier process had left them in the spool"
        self.warn("rejected", name=name, reason=reason, then=then)

    def lost(self, samples: int, events: int) -> None:
        what = " and ".join(some(count, kind) for count, kind in ((samples, "sample"), (events, "event")) if count)
        self.warn("lost", lost=f"{what} {'is' if samples + events == 1 else 'are'}")

    def left(self, frames: int, size: int, *, by_next_run: bool) -> None:
        """Reports frames that are not delivered at the end. by_next_run: False if this rank never learned its run id."""
        config = self._handoff.config
        there = f" --server {config.server}" if config.is_server_given else ""
        later = "; so does the next run here that sends to this server, within a week" if by_next_run else ""
        self.warn("left", much=f"{some(frames, 'frame')} ({max(1, size >> 10):,} KiB)", there=there, later=later)

    # ---- the training and the server

    def begun(self) -> None:
        """Rank 0's run is to be seen from here on. That is no trouble, but without a handler logging shows warnings only."""
        who, config = self._handoff.identity, self._handoff.config
        if who.rank == 0:
            name = who.name or who.default_name(config.run_id) or who.run
            self.warn(
                "address", level=logging.INFO if logger.hasHandlers() else logging.WARNING, run=who.run, name=name
            )

    def alarms(self, events: Iterable[Event]) -> None:
        """A NaN, memory that ran out, a crash: with the place to look at."""
        p, identity, config = self._handoff.progress, self._handoff.identity, self._handoff.config
        step = 0 if p is None else p.completed or p.logged_at() or 0
        for event in events:
            found = alarm(event.kind, event.data, step)
            if found is None:
                continue
            rank = f"rank {identity.rank}: " if identity.world_size > 1 else ""
            where = f"{config.server}/run/{identity.run}" if identity.run else f"server {config.server}"
            kept = config.record
            see = f"See {where}" if kept is None else f"Recorded in {kept}; `perfagent sync {kept}` sends it"
            self._handoff.tell(f"alarm {found[0]}", logging.ERROR, f"perfagent: {rank}{found[1]} {see}")

    def reachable(self, now: float, *, again: bool) -> None:
        """It answered; again: after failures."""
        if again:
            logger.info("perfagent: server %s reachable again", self._handoff.config.server)
        if now - self._unreachable_at >= TELL_AGAIN_S:
            self._handoff.said_topics.discard("unreachable")

    def undelivered(self, answer: Answer, now: float) -> None:
        """An answer that means to try later."""
        if answer.kind in ("unauthorized", "foreign"):
            level = logging.ERROR if answer.kind == "unauthorized" else logging.WARNING
            self.warn(answer.kind, level=level, reason=answer.reason)
        elif answer.kind == "retry" and answer.reason.startswith("status"):
            self.warn("busy", reason=answer.reason)
        else:
            self._unreachable_at = self._unreachable_at if "unreachable" in self._handoff.said_topics else now
            stopped = stopped_server(self._handoff.config.server)
            self.warn("unreachable", reason=_line(answer.reason), stopped=f" ({stopped})" if stopped else "")


def alarm(kind: str, data: Mapping[str, Any], step: int) -> tuple[str, str] | None:
    """(what happened, as one word; the sentence) of an event; None for events that a console need not show.

    data: redacted. step: the last step of the run, 0 before the first.
    """
    evidence, since = data.get("evidence") or {}, data.get("since_step")
    if kind == "finding" and data.get("rule") == "nonfinite_loss":
        return _nonfinite(since, evidence)
    if kind == "finding" and data.get("rule") == "oom_observed":
        tried = evidence.get("tried_bytes")
        asked = f": {tried >> 20:,} MiB could not be allocated" if tried is not None else ""
        return "oom", f"out of {evidence.get('device')} memory in step {since}{asked}."
    state, exception = data.get("state"), data.get("exception")
    if kind != "state" or state not in ("failed", "oom") or exception in (None, "KeyboardInterrupt"):
        return None
    word, what = ("oom", "out of memory") if state == "oom" else ("crash", "the job crashed")
    after = f" after step {step}" if step else ""
    reason = data.get("reason") or exception
    said = reason.get("why") if isinstance(reason, Mapping) else reason
    return word, f"{what}{after}. {str(said).rstrip('.')}."


def _nonfinite(step: object, evidence: Mapping[str, Any]) -> tuple[str, str] | None:
    loss = evidence.get("loss")
    sound = isinstance(loss, float) and math.isfinite(loss)
    if sound and "loss_scale" in evidence:
        return None  # a gradient that overflowed: GradScaler leaves such a step out and lowers its scale
    what = "gradients are NaN or infinite" if sound else "the loss is NaN or infinite"
    cause = evidence.get("cause", "unknown")
    named = [evidence["operator"]["operator"]] if cause == "operator" and "operator" in evidence["operator"] else []
    named += [repr(evidence[key]) for key in _NAMED if key in evidence][:1]
    found = f"Cause: {cause.replace('_', ' ')}" + (f" ({', '.join(named)})" if named else "")
    return "nonfinite", f"{what} in step {step}. {'Its cause was not found' if cause == 'unknown' else found}."


def damage(spool: Spool) -> str:
    """What could not be read of a source; empty where all could."""
    text = ""
    if damaged := spool.counters["corrupt"]:
        text += f"; {some(damaged, 'file')} in {spool.folder} damaged, and read up to there"
    if unread := spool.counters["unreadable"]:
        text += f"; {some(unread, 'file')} could not be read ({spool.error or 'an error of the disk'})"
    if gone := spool.counters["dropped"]:
        text += f"; {some(gone, 'sample')} could not be read back"
    return text


def _line(text: object) -> str:
    """What came from elsewhere, short enough for a line that says more."""
    found = " ".join(str(text or "").split())
    return found if len(found) <= 200 else found[:199] + "…"
