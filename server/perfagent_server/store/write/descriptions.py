"""What users and agents say about a run in words: configuration, tags, notes and the rest of its `meta`.

A run's description is read once a transaction, joined in memory and written once, however many events speak of it: to
read and write a config of 256 kB for each of 20,000 events held the writer for 27 s.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from perfagent.errors import WireError
from perfagent.wire import to_json
from perfagent_server.store.statements import Prepared
from perfagent_server.store.stored_json import stored_names, stored_object
from perfagent_server.store.tables import run as runs

__all__ = ["SET_BY_PEOPLE", "Descriptions", "note_left_out", "set_by_people"]

SET_BY_PEOPLE = "_set_by_people"
"""In a run's `meta`, shown to nobody: what of `name` and `tags` a person has set, which no job changes from then on."""
_NOTES_CHARACTERS = 100_000
_CONFIG_BYTES = 256 * 1024
_TAGS = 100
_OWN_COLUMN = {
    "state",
    "heartbeat",
    "name",
    "config",
    "tags",
    "group",
    "notes",
    "start_step",
    "world_size",
    "host",
    "pid",
    "reason",
    "traceback",
    "exception",
    SET_BY_PEOPLE,
}
_load = Prepared(
    select(runs.c.id, runs.c.tags, runs.c.notes, runs.c.config, runs.c.meta).where(runs.c.id == bindparam("_id"))
)
_write = Prepared(
    update(runs)
    .where(runs.c.id == bindparam("_id"))
    .values({name: bindparam(name) for name in ("tags", "notes", "config", "meta")})
)


@dataclass(slots=True)
class _Description:
    """tags: in their order, as keys. by_people: what of it a person has set."""

    tags: dict[str, None]
    notes: str
    config: dict[str, Any]
    meta: dict[str, Any]
    by_people: list[str]

    def row(self, run: str) -> dict[str, str]:
        return {
            "_id": run,
            "tags": _json(list(self.tags)),
            "notes": self.notes,
            "config": _json(self.config),
            "meta": set_by_people(_json(self.meta), self.by_people),
        }


class Descriptions:
    """Those of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._of: dict[str, _Description] = {}

    def add(self, run: dict[str, Any], name: str | None, data: dict[str, Any]) -> None:
        """Adds to what the run has already, and leaves alone what a person has set since. name: the frame's."""
        described = self._of.get(run["id"])
        if described is None:
            described = self._of[run["id"]] = self._load(run["id"])
        called = data.get("name") or name
        # A later attempt keeps what the run is called by now.
        if isinstance(called, str) and called and run["attempts"] <= 1 and "name" not in described.by_people:
            run["name"] = called[:256]
        tags, config = data.get("tags"), data.get("config")
        if isinstance(tags, (list, tuple)) and "tags" not in described.by_people:
            new = dict.fromkeys(text for tag in tags if (text := str(tag)[:256]) not in described.tags)
            room = _TAGS - len(described.tags)
            described.tags.update(dict.fromkeys(list(new)[:room]))
            if len(new) > room:
                note_left_out(run, "tags", len(new) - room, _TAGS)
        described.notes = described.notes or str(data.get("notes") or "")[:_NOTES_CHARACTERS]  # what people wrote stays
        if isinstance(config, dict):
            described.config.update(config)
        described.meta.update((key, value) for key, value in data.items() if key not in _OWN_COLUMN)

    def write(self) -> None:
        if self._of:
            _write.many(self._connection, [described.row(run) for run, described in self._of.items()])

    def _load(self, run: str) -> _Description:
        ((_, tags, notes, config, meta),) = _load.all(self._connection, {"_id": run})
        known = stored_object(meta)
        by_people = known.pop(SET_BY_PEOPLE, [])
        return _Description(dict.fromkeys(stored_names(tags)), notes, stored_object(config), known, by_people)


def note_left_out(run: dict[str, Any], what: str, count: int, limit: int, *, exact: bool = False) -> bool:
    """Notes that for so many names, or tags, of a run there was no room; exact: for no more. False where that was noted
    before."""
    known = stored_object(run["left_out"])
    if known.get(what, {}).get("count", 0) >= count:
        return False
    run["left_out"] = json.dumps({**known, what: {"count": count, "limit": limit, **({"exact": 1} if exact else {})}})
    return True


def set_by_people(meta: str, fields: Collection[str]) -> str:
    """A run's `meta` with the note that a person has set these of its fields, besides those that it notes already."""
    if not fields:
        return meta
    found = stored_object(meta)
    return json.dumps({**found, SET_BY_PEOPLE: sorted({*found.get(SET_BY_PEOPLE, []), *fields})})


def _json(value: Any) -> str:
    """JSON text of what a user gave us; what JSON cannot say becomes its text, and what is too large is named, not
    kept."""
    try:
        text = to_json(value).decode()
    except (WireError, ValueError, OverflowError, RecursionError):
        try:
            text = json.dumps(value, default=str, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return "{}" if isinstance(value, dict) else "[]"
    if len(text) > _CONFIG_BYTES:
        return (
            json.dumps({"dropped": f"{len(text)} bytes; {_CONFIG_BYTES} are kept"}) if isinstance(value, dict) else "[]"
        )
    return text
