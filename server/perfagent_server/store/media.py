"""Images, audio, tables and histograms of runs: stored with their frame, thinned to a run's allowance, and read again.

Their bytes stay in the database, as those of profiles do (artifacts.py). A list never reads them: the index has all that
it needs. What an older attempt has from a later one's first step on is cut from view, as samples are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, false, func, insert, or_, select

from perfagent.wire import Event, Frame
from perfagent.wire.events import HistogramMedia, media_type_of
from perfagent.wire.limits import MAX_COUNT
from perfagent_server.database import Database
from perfagent_server.store.read.view import visible_attempts
from perfagent_server.store.tables import event, media

__all__ = ["HistogramOfStep", "MediaItem", "MediaName", "MediaStore", "store_media"]

RUN_BYTES, RUN_ITEMS = 512 * 2**20, 20_000
"""Of one run. Above this, steps between the first and the newest go, so that those that stay are evenly spaced."""
_KEPT_SHARE = 15 / 16
"""What is left when some had to go, so that the next frames need not delete again."""
_OF_ALL = (func.count(), func.coalesce(func.sum(media.c.bytes), 0))


def store_media(connection: Connection, frame: Frame, events: Sequence[Event], now: float) -> None:
    """In the transaction that stores the frame. Their fields were checked when the frame was read."""
    rows = [
        {
            "run": frame.run, "attempt": frame.attempt, "rank": frame.rank, "name": item.data["name"],
            "kind": item.data["what"], "step": item.step or 0, "place": item.data.get("index") or 0,
            "time": item.time if math.isfinite(item.time) else now,
            "type": media_type_of(item.data["what"], item.data["payload"]), "bytes": len(item.data["payload"]),
            "caption": (item.data.get("caption") or "").replace("\0", ""), "data": item.data["payload"],
            **_sides(item.data["payload"]),
        }
        for item in events
    ]  # fmt: skip
    connection.execute(insert(media), rows)
    _keep_within(connection, frame.run)


def _sides(payload: bytes) -> dict[str, int | None]:
    """Of a PNG, which is what agents make."""
    is_png = payload[12:16] == b"IHDR" and len(payload) > 24
    width, height = struct.unpack(">II", payload[16:24]) if is_png else (0, 0)
    is_right = 0 < width <= MAX_COUNT and 0 < height <= MAX_COUNT
    return {"width": width if is_right else None, "height": height if is_right else None}


def _keep_within(connection: Connection, run: str) -> None:
    while True:
        count, size = connection.execute(select(*_OF_ALL).where(media.c.run == run)).one()
        if count <= RUN_ITEMS and size <= RUN_BYTES:
            return
        if not _thin(connection, run, count - RUN_ITEMS * _KEPT_SHARE, size - RUN_BYTES * _KEPT_SHARE):
            # thousands of names with a step or two each: the oldest go
            oldest = select(media.c.id).where(media.c.run == run).order_by(media.c.id).limit(count // 16 + 1)
            connection.execute(delete(media).where(media.c.id.in_(oldest)))


def _thin(connection: Connection, run: str, items: float, size: float) -> bool:
    """Deletes steps of the name that has most: those closest to their neighbors first, and of these the oldest; no two
    neighbors at once. So many items and bytes are to go. False where no name has a step between others."""
    steps = media.c.name, media.c.step
    rows = connection.execute(
        select(*steps, *_OF_ALL).where(media.c.run == run).group_by(*steps).order_by(*steps)
    ).all()
    by_name: dict[str, list[tuple[int, int, int]]] = {}
    for name, step, count, held in rows:
        by_name.setdefault(name, []).append((step, count, held))
    long = [one for one in by_name.items() if len(one[1]) > 2]
    if not long:
        return False
    name, found = max(long, key=lambda one: sum(held / RUN_BYTES + count / RUN_ITEMS for _, count, held in one[1]))
    gaps = sorted((found[at + 1][0] - found[at - 1][0], at) for at in range(1, len(found) - 1))
    going: set[int] = set()
    gone_items = gone_bytes = 0
    for _, at in gaps:
        if gone_items >= items and gone_bytes >= size:
            break
        if not going & {at - 1, at + 1}:
            going.add(at)
            gone_items, gone_bytes = gone_items + found[at][1], gone_bytes + found[at][2]
    its = and_(media.c.run == run, media.c.name == name)
    for at in going:
        connection.execute(delete(media).where(its, media.c.step == found[at][0]))
    return True


@dataclass(slots=True, kw_only=True)
class MediaName:
    """What was logged under one name. items, bytes: how many there are, and their size; steps: how many steps have some,
    between the first and the last of them."""

    name: str
    kind: str
    items: int
    bytes: int
    steps: int
    first_step: int
    last_step: int


@dataclass(slots=True, kw_only=True)
class MediaItem:
    """One image, sound, table or histogram. index: its place among those of the same name and step; type: of its bytes, at
    url on this server."""

    id: int
    name: str
    kind: str
    step: int
    index: int
    rank: int
    attempt: int
    time: float
    type: str
    bytes: int
    caption: str
    width: int | None
    height: int | None
    url: str


@dataclass(slots=True, kw_only=True)
class HistogramOfStep:
    """counts: of bins of equal width from low to high; count: of all values that were logged, nonfinite of which, as far as
    they were looked at, are in no bin."""

    step: int
    low: float
    high: float
    counts: list[int]
    nonfinite: int
    count: int


class MediaStore:
    """Reads the media of runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def any(self, run: str) -> bool:
        with self._database.read() as connection:
            return connection.execute(select(media.c.run).where(media.c.run == run).limit(1)).first() is not None

    def names(self, run: str) -> list[MediaName]:
        """In the order of the alphabet."""
        by = media.c.name, media.c.kind
        steps = func.count(media.c.step.distinct()), func.min(media.c.step), func.max(media.c.step)
        with self._database.read() as connection:
            rows = connection.execute(
                select(*by, *_OF_ALL, *steps).where(_seen(connection, run)).group_by(*by).order_by(*by)
            )
            return [
                MediaName(
                    name=row[0],
                    kind=row[1],
                    items=row[2],
                    bytes=int(row[3]),
                    steps=row[4],
                    first_step=row[5],
                    last_step=row[6],
                )
                for row in rows
            ]

    def items(self, run: str, name: str | None, at: int | None, before: int | None, limit: int) -> list[MediaItem]:
        """Newest first. name: None is any; at: only of the last step of that name up to this one, in their order; before:
        only those with a smaller id, for paging back."""
        with self._database.read() as connection:
            wanted = [_seen(connection, run)] + ([media.c.name == name] if name is not None else [])
            query = select(*(column for column in media.c if column.name != "data"))
            if at is not None:
                step = connection.execute(select(func.max(media.c.step)).where(*wanted, media.c.step <= at)).scalar()
                wanted.append(media.c.step == step)
                query = query.order_by(media.c.rank, media.c.place, media.c.id)
            else:
                query = query.order_by(media.c.id.desc())
            wanted += [media.c.id < before] if before is not None else []
            return [_item(row) for row in connection.execute(query.where(*wanted).limit(limit)).mappings()]

    def get(self, run: str, identity: int) -> tuple[str, bytes] | None:
        """Type and bytes of one."""
        query = select(media.c.type, media.c.data).where(media.c.run == run, media.c.id == identity)
        with self._database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else (row[0], bytes(row[1]))

    def histograms(self, run: str, name: str, most: int) -> list[HistogramOfStep]:
        """Of evenly spaced steps, oldest first; of a step that has several the first."""
        with self._database.read() as connection:
            its = and_(_seen(connection, run), media.c.name == name, media.c.kind == "histogram")
            ids = select(func.min(media.c.id)).where(its).group_by(media.c.step).order_by(media.c.step)
            known = list(connection.execute(ids).scalars())
            every = max(1, math.ceil(len(known) / most))
            wanted = known[::-1][::every]  # the newest is among them
            rows = connection.execute(
                select(media.c.step, media.c.data).where(media.c.id.in_(wanted)).order_by(media.c.step)
            ).all()
        return [HistogramOfStep(step=row.step, **_fields(row.data)) for row in rows]

    def left_out(self, run: str) -> int:
        """How many the agents of a run have left out, as they told it."""
        newest = (
            select(func.max(event.c.id)).where(event.c.run == run, event.c.kind == "media").group_by(event.c.source)
        )
        with self._database.read() as connection:
            told = connection.execute(select(event.c.data).where(event.c.id.in_(newest))).scalars().all()
        return sum(msgspec.msgpack.decode(data).get("left_out") or 0 for data in told)


def _fields(data: bytes) -> dict[str, Any]:
    return msgspec.structs.asdict(msgspec.json.decode(data, type=HistogramMedia))


def _seen(connection: Connection, run: str) -> ColumnElement[bool]:
    tops = visible_attempts(connection, run)
    return and_(
        media.c.run == run, or_(false(), *(and_(media.c.attempt == one, media.c.step <= top) for one, top in tops))
    )


def _item(row: Mapping[Any, Any]) -> MediaItem:
    given = {
        name: row[name]
        for name in ("id", "name", "kind", "step", "rank", "attempt", "time", "type", "bytes", "caption")
    }
    url = f"/api/v1/runs/{quote(row['run'], safe='')}/media/{row['id']}"
    return MediaItem(**given, index=row["place"], width=row["width"], height=row["height"], url=url)
