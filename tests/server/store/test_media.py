"""Images, audio, tables and histograms: stored once, thinned to a run's allowance, deleted by age and with their run."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import select

from perfagent.wire import Event
from perfagent_server.store import media as store_media
from perfagent_server.store import tables
from perfagent_server.store.media import MediaStore
from perfagent_server.store.retention import DAY_S
from perfagent_server.store.retention.sizes import measure_run

PNG = b"\x89PNG\r\n\x1a\n" + bytes(92)


def logged(step: int, name: str = "samples", payload: bytes = PNG, time: float = BEGIN, **data: Any) -> Event:
    return Event(kind="media", time=time, step=step, data={"name": name, "what": "image", "payload": payload, **data})


def histogram(step: int) -> Event:
    told = {"low": 0, "high": step, "counts": [1, step], "nonfinite": 0, "count": step + 1}
    return logged(step, "weights", json.dumps(told).encode(), what="histogram")


def steps(shelf, name: str = "samples") -> list[int]:
    return shelf.ask(select(tables.media.c.step).where(tables.media.c.name == name).order_by(tables.media.c.step))


@pytest.mark.sql
def test_a_frame_that_comes_twice_stores_its_media_once(shelf) -> None:
    sent = frame(1, state("running"), logged(3, caption="a", index=1), logged(3, caption="b"), histogram(5))
    for _ in range(2):
        shelf.append(sent)
    assert shelf.ask(select(tables.event.c.kind)) == ["state"], "they are no events"
    media = MediaStore(shelf.database)
    assert [(one.name, one.items, one.last_step) for one in media.names("r1")] == [("samples", 2, 3), ("weights", 1, 5)]
    assert [one.caption for one in media.items("r1", "samples", 4, None, 9)] == ["b", "a"]
    assert media.items("r1", "samples", 2, None, 9) == []
    (one,) = media.histograms("r1", "weights", 9)
    assert (one.step, one.high, one.counts) == (5, 5.0, [1, 5])


@pytest.mark.sql
def test_a_full_run_keeps_first_and_newest_and_an_even_rest(shelf, monkeypatch) -> None:
    monkeypatch.setattr(store_media, "RUN_BYTES", 16 * len(PNG))
    shelf.append(frame(1, state("running"), *(logged(0, f"once {at}") for at in range(4))))
    for step in range(1, 101):
        shelf.append(frame(step + 1, logged(step)))
    kept = steps(shelf)
    gaps = [after - before for before, after in itertools.pairwise(kept)]
    assert (kept[0], kept[-1]) == (1, 100)
    assert len(kept) in range(9, 13), "16, less those of other names"
    assert max(gaps) <= 20, kept
    assert len(steps(shelf, "once 0")) == 1, "a name with one step keeps it"


@pytest.mark.sql
def test_of_thousands_of_names_with_one_step_the_oldest_go(shelf, monkeypatch) -> None:
    monkeypatch.setattr(store_media, "RUN_ITEMS", 10)
    shelf.append(frame(1, state("running"), *(logged(at, f"sample {at}") for at in range(40))))
    names = shelf.ask(select(tables.media.c.name).order_by(tables.media.c.id))
    assert len(names) <= 10
    assert names[-1] == "sample 39"


def test_many_names_are_thinned_at_once_and_well_below_full(shelf, monkeypatch) -> None:
    monkeypatch.setattr(store_media, "RUN_ITEMS", 800)
    for step in range(1, 10):
        shelf.append(frame(step, state("running"), *(logged(step, f"layer {at:02}") for at in range(100))))
    held = shelf.count(tables.media)
    assert held <= 800 * 15 / 16, "else the next frame would thin again"
    assert held >= 700
    assert {first: steps(shelf, f"layer {first:02}")[0] for first in range(100)} == dict.fromkeys(range(100), 1)


@pytest.mark.sql
def test_a_later_attempt_cuts_the_media_of_an_older_one(shelf) -> None:
    shelf.append(frame(1, state("running"), rows({"loss": [1.0]}, [1]), *(logged(step) for step in (10, 20, 30))))
    shelf.append(frame(1, state("running", start_step=15), logged(40), attempt=2))
    seen = MediaStore(shelf.database).items("r1", None, None, None, 9)
    assert [one.step for one in seen] == [40, 10]


@pytest.mark.sql
def test_old_media_go_by_age_and_all_with_their_run(shelf) -> None:
    shelf.append(frame(1, state("running"), logged(1), state("finished")))
    shelf.now = BEGIN + 100 * DAY_S
    shelf.append(frame(2, *(logged(step, time=shelf.now) for step in range(2, 40))))
    measure_run(shelf.database, "r1", shelf.now)
    assert shelf.ask(select(tables.run_storage.c.other_bytes))[0] > 39 * len(PNG)
    shelf.retention(media_days=90).run_once()
    assert steps(shelf) == [*range(2, 40)]
    shelf.store.delete("r1")
    assert shelf.count(tables.media) == 0
