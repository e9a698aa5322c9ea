"""How far runs of the past are imported: kept with their samples, in one transaction, so that an import that was killed goes on
where it was."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec
from sqlalchemy import Connection, select

from perfagent.wire import Frame
from perfagent_server.event_data import ImportData
from perfagent_server.store.statements import among, insert_for
from perfagent_server.store.tables import imported_run
from perfagent_server.store.tables import run as runs

__all__ = ["Imported", "imported", "take"]


@dataclass(frozen=True, slots=True)
class Imported:
    """import_id: the import that began the run; source: that its first frame came from; seq: of its newest frame; taken: samples
    and events that are here, by series."""

    import_id: str
    source: str
    seq: int
    taken: dict[str, int]


def take(connection: Connection, frame: Frame) -> Iterator[ImportData]:
    """Notes what a frame says of an import. The import and the source of a run stay those of its first frame."""
    for item in frame.events:
        if item.kind != "import":
            continue
        said = msgspec.convert(item.data, ImportData)
        values = {
            "run": frame.run, "import_id": said.import_id, "source": frame.source, "seq": frame.seq,
            "taken": json.dumps(said.taken),
        }  # fmt: skip
        its = insert_for(connection.dialect.name)(imported_run).values(**values)
        newer = {name: values[name] for name in ("seq", "taken")}
        connection.execute(its.on_conflict_do_update(index_elements=["run"], set_=newer))
        yield said


def imported(connection: Connection, names: Collection[str]) -> dict[str, tuple[str, Imported | None]]:
    """Of these runs those that are here: their projects, and how far they are imported; None for a run of another origin."""
    columns = imported_run.c.import_id, imported_run.c.source, imported_run.c.seq, imported_run.c.taken
    query = select(runs.c.id, runs.c.project, *columns).outerjoin(imported_run, imported_run.c.run == runs.c.id)
    return {
        run: (project, None if import_id is None else Imported(import_id, source, seq, json.loads(taken)))
        for run, project, import_id, source, seq, taken in connection.execute(
            query.where(among(connection, runs.c.id, names))
        )
    }
