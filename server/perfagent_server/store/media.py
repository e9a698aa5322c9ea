"""Images, audio, tables and histograms of runs: stored with their frame, thinned to a run's allowance, and read again.

Their bytes stay in the database, as those of profiles do (artifacts.py). A list never reads them: the index has all that
it needs. What an older attempt has from a later one's first step on is cut from view, as samples are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, false, func, insert, or_, select

from perfagent.wire import Event, Frame
from perfagent.wire.limits import MAX_COUNT
from perfagent_server.database import Database
from perfagent_server.event_data import HistogramMedia, media_type_of
from perfagent_server.store.read.view import visible_attempts
from perfagent_server.store.statements import among
from perfagent_server.store.tables import event, media

__all__ = ["HistogramOfStep", "MediaItem", "MediaName", "MediaStore", "store_media"]

RUN_BYTES, RUN_ITEMS = 512 * 2**20, 20_000
"""Of one run. Above this, steps between the first and the newest go, so that those that stay are evenly spaced."""
_KEPT_SHARE = 15 / 16
"""What is left when some had to go, so that the next frames need not delete again."""
_MOST_STOPS = 200
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
    count, size = connection.execute(select(*_OF_ALL).where(media.c.run == run)).one()
    if count <= RUN_ITEMS and size <= RUN_BYTES:
        return
    steps = media.c.name, media.c.step
    rows = connection.execute(select(*steps, *_OF_ALL).where(media.c.run == run).group_by(*steps).order_by(*steps))
    by_name: dict[str, list[_Step]] = {}
    for name, *step in rows:
        by_name.setdefault(name, []).append(_Step(*step))
    going = _Going(count - RUN_ITEMS * _KEPT_SHARE, size - RUN_BYTES * _KEPT_SHARE)
    while not going.are_enough and going.thin(by_name):
        pass
    for name, numbers in going.steps.items():
        its = and_(media.c.run == run, media.c.name == name)
        connection.execute(delete(media).where(its, among(connection, media.c.step, numbers)))
    if not going.are_enough:  # thousands of names with a step or two each: the oldest go
        oldest = (
            select(media.c.id)
            .where(media.c.run == run)
            .order_by(media.c.id)
            .limit(math.ceil(going.items) + count // 16)
        )
        connection.execute(delete(media).where(media.c.id.in_(oldest)))


class _Step(NamedTuple):
    """Of one name: how many items it has, and their bytes."""

    number: int
    items: int
    bytes: int


@dataclass(slots=True)
class _Going:
    """items, bytes: how many are still to go; steps: that go, by name."""

    items: float
    bytes: float
    steps: dict[str, list[int]] = field(default_factory=dict)

    @property
    def are_enough(self) -> bool:
        return self.items <= 0 and self.bytes <= 0

    def thin(self, by_name: dict[str, list[_Step]]) -> bool:
        """Takes steps out of the names that have most, until enough go. False where no name has a step between others."""
        long = [name for name, found in by_name.items() if len(found) > 2]
        weights = {name: sum(one.bytes / RUN_BYTES + one.items / RUN_ITEMS for one in by_name[name]) for name in long}
        for name in sorted(long, key=lambda one: -weights[one]):
            by_name[name] = self._thinned(name, by_name[name])
            if self.are_enough:
                break
        return bool(long)

    def _thinned(self, name: str, found: list[_Step]) -> list[_Step]:
        """Without those closest to their neighbors, of these the oldest first; no two neighbors at once."""
        gaps = sorted((found[at + 1].number - found[at - 1].number, at) for at in range(1, len(found) - 1))
        going: set[int] = set()
        for _, at in gaps:
            if self.are_enough:
                break
            if not going & {at - 1, at + 1}:
                going.add(at)
                self.items, self.bytes = self.items - found[at].items, self.bytes - found[at].bytes
        self.steps.setdefault(name, []).extend(found[at].number for at in going)
        return [one for at, one in enumerate(found) if at not in going]


@dataclass(slots=True, kw_only=True)
class MediaName:
    """The media that a script logged under one name. items: their number; bytes: their size; steps: the number of steps with
    media; first_step, last_step: of these; at: all of them, or 200 evenly spaced ones if there are more."""

    name: str
    kind: str
    items: int
    bytes: int
    steps: int
    first_step: int
    last_step: int
    at: list[int]


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
    they were examined, are in no bin."""

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
        with self._database.read() as connection:
            seen = _seen(connection, run)
            sizes = connection.execute(select(*by, *_OF_ALL).where(seen).group_by(*by).order_by(*by)).all()
            steps: dict[tuple[str, str], list[int]] = {}
            for name, kind, step in connection.execute(
                select(*by, media.c.step).where(seen).distinct().order_by(*by, media.c.step)
            ):
                steps.setdefault((name, kind), []).append(step)
        return [_named(name, kind, items, int(held), steps[name, kind]) for name, kind, items, held in sizes]

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


def _named(name: str, kind: str, items: int, held: int, steps: Sequence[int]) -> MediaName:
    every = math.ceil(len(steps) / _MOST_STOPS)
    at = sorted({steps[0], *steps[::-1][::every]})  # the newest is among them
    return MediaName(
        name=name, kind=kind, items=items, bytes=held, steps=len(steps), first_step=steps[0], last_step=steps[-1], at=at
    )


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
