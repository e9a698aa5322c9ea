"""All runs at a glance: once a second, what has changed of every run that moved, with the last values of some names.

A thousand agents send here, so that a frame costs as much as the names that are wanted of it: of each only the last row
is read. The rest of the message is read from the table of runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perfagent.wire import plain
from perfagent_server.live.subscription import Subscription
from perfagent_server.store.read.ranks import latest_over_ranks
from perfagent_server.store.stored import Stored
from perfagent_server.store.write.lifecycle import ENDED

__all__ = ["Fleet"]

_MISSING = object()


@dataclass(slots=True)
class _Values:
    """The last values of one run. of_ranks: name -> rank -> (attempt, step, time, value); fresh: names with a value
    that was not told yet."""

    attempt: int
    of_ranks: dict[str, dict[int, tuple[int, int, float, float]]] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)


class Fleet:
    """What the pages of one fleet subscription know, and what they are to be told next."""

    def __init__(self, subscription: Subscription) -> None:
        self._names = subscription.names
        self._values: dict[str, _Values] = {}
        self._told: dict[str, Mapping[str, Any]] = {}
        self._tell_all = False

    def add(self, stored: Stored) -> None:
        values = self._values.get(stored.run)
        if values is None or stored.attempt > values.attempt:
            values = self._values[stored.run] = _Values(stored.attempt)
        elif stored.attempt < values.attempt:
            return
        for group in stored.groups:
            names = group.values.keys() & self._names
            if not names or not group.rows:
                continue
            (step,) = struct.unpack_from("<q", group.step, len(group.step) - 8)
            (time,) = struct.unpack_from("<d", group.time, len(group.time) - 8)
            for name in names:
                ranks = values.of_ranks.setdefault(name, {})
                held = ranks.get(stored.rank)
                if held is None or (step, time) >= held[1:3]:
                    ranks[stored.rank] = (stored.attempt, step, time, _last(group.values[name], group.rows))
                    values.fresh.add(name)

    def message(self, moved: Iterable[str], rows: Mapping[str, Mapping[str, Any]]) -> bytes:
        """What has changed of these runs since they were told of; null for those that are gone. rows: the present rows
        of the table of runs."""
        if self._tell_all:
            self._tell_all = False
            self._told = {}
        return msgspec.json.encode({"fleet": {run: self._change(run, rows.get(run)) for run in moved}})

    def tell_all(self) -> None:
        """A page has come that knows nothing yet, or has lost messages: of each run that moves everything is told once
        more. From any thread."""
        self._tell_all = True

    def _change(self, run: str, row: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if row is None:
            self._values.pop(run, None)
            self._told.pop(run, None)
            return None
        has_ended = row["state"] in ENDED
        told = self._told.get(run)
        change = {name: value for name, value in row.items() if told is None or told.get(name, _MISSING) != value}
        values = self._values.get(run)
        # What comes after the end of a run, or was there before this page, may be of some ranks only, or of older steps.
        if values is not None and values.fresh and not (has_ended and told is None):
            change["values"] = {
                name: plain(latest_over_ranks(name, values.of_ranks[name]).value) for name in sorted(values.fresh)
            }
            values.fresh.clear()
        if has_ended:  # nothing is kept of it; should it move again, all is told
            self._values.pop(run, None)
            self._told.pop(run, None)
        else:
            self._told[run] = row
        return change


def _last(raw: bytes, rows: int) -> float:
    if len(raw) == 8 * rows:
        return float(struct.unpack_from("<d", raw, len(raw) - 8)[0])
    return float(struct.unpack_from("<f", raw, len(raw) - 4)[0])
