"""Bundles: what many series have in a block with room lies in one row, and no question can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count as counting

import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from perfagent.errors import WireError
from perfagent_server.store import tables
from perfagent_server.store.codec.wide_blocks import BUNDLE_SERIES, Place, bundle_rows, bundled_samples, put_bundles
from perfagent_server.store.retention import DAY_S, Retention, RetentionPolicy
from perfagent_server.store.shards import shard_of
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor

pytestmark = pytest.mark.blocks

NAMES = [f"m{at}" for at in range(70)]
numbers = counting()


def count(shelf, table) -> int:
    with shelf.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def wide(steps: Sequence[int], *, seed: int = 0, names: Sequence[str] = NAMES) -> dict[str, np.ndarray]:
    """A column for each name; every third one needs float64. All sums are exact, in whatever order they are made."""
    made = np.random.default_rng(seed).standard_normal((len(names), len(steps)))
    fine, coarse = np.round(made * 2**35) / 2**35, np.round(made * 2**10).astype("f4") / 2**10
    return {name: fine[at] if at % 3 == 0 else coarse[at] for at, name in enumerate(names)}


def exported(shelf, run: str = "r1") -> list[tuple[str, int, int, float, str]]:
    """Every sample; the value by its digits, in which a NaN is as good as another number."""
    return [(row.name, row.rank, row.step, row.time, repr(row.value)) for row in shelf.store.samples(run)]


def answers(shelf, run: str, *, cut: bool) -> list[str]:
    """What a page would ask, as text (in which a NaN equals a NaN). cut: without questions in which the width of a
    bucket goes by how far a series reaches, for that is known by the block only where a later attempt cuts one."""
    asked = [{"rank": rank, "points": 20_000} for rank in (0, 1)]
    found = [repr(sorted(shelf.store.latest(run).items()))]
    if not cut:
        asked += [
            {},
            {"points": 3},
            {"points": 1},
            {"from_step": 3, "to_step": 700, "points": 9},
            {"rank": 0, "points": 7},
        ]
        found.append(repr(shelf.store.ranks(run, "m1", points=5)))
    return [*found, *(repr(shelf.store.series(run, name, **how)) for name in ("m1", "m69") for how in asked)]


@pytest.mark.parametrize("length", [1, 2, 100, 1023])
def test_a_bundle_gives_every_series_back_bit_by_bit(shelf, length: int) -> None:
    """Ids with gaps, in any order; NaN payloads, -0.0 and infinities; groups that are cut into several rows."""
    shelf.append(frame(1, rows({f"s{at}": [1.0] for at in range(300)}, [1])))
    with shelf.database.read() as connection:
        ids = connection.execute(select(tables.series.c.id)).scalars().all()
    chosen = np.random.default_rng(5).permutation(ids)[:200].tolist()
    value = np.random.default_rng(6).standard_normal((200, length))
    value[::2] = value[::2].astype("f4")
    value[4, 0], value[5, -1], value[6, 0] = -0.0, math.inf, np.array([0x7FF8000000000123], "u8").view("f8")[0]
    step, time = np.arange(length) * 2 + 5, BEGIN + np.arange(length) * 0.25
    made = bundle_rows(Place("r1", 0, 1), 0, chosen[0], step, time, chosen, value)
    shelf.database.write(lambda connection: put_bundles(connection, made))
    assert sum(row[7] for row in made) == value.size
    with shelf.database.read() as connection:
        for at, series_id in enumerate(chosen):
            [(rank, attempt, samples)] = bundled_samples(connection, [series_id])
            assert (rank, attempt, samples.step.tolist(), samples.time.tolist()) == (0, 1, step.tolist(), time.tolist())
            assert samples.value.tobytes() == value[at].tobytes()
        assert list(bundled_samples(connection, [each for each in ids if each not in chosen])) == []


def test_a_bundle_of_a_newer_format_says_so(shelf) -> None:
    shelf.append(frame(1, rows(wide([1, 2]), [1, 2])))
    shelf.compact()
    newer = b"\x09" + bytes(20)
    shelf.database.write(lambda connection: connection.execute(tables.bundle.update().values(payload=newer)))
    with pytest.raises(WireError, match="bundles of format 9 are not known here; upgrade perfagent"):
        shelf.store.series("r1", "m0")


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int, int, list[int], list[str]]]:
    """("frame", rank, attempt, steps, names) and ("compact", ...): groups of many names, and pieces of some of them."""
    story = []
    for _ in range(draw(st.integers(2, 8))):
        start = draw(st.sampled_from([0, 0, 30, 900, 1024, 2000, 17_000]))
        steps = [start + draw(st.sampled_from([1, 1, 7])) * at for at in range(draw(st.integers(1, 40)))]
        names = draw(st.sampled_from([NAMES, NAMES, NAMES[::-1], NAMES[:40], NAMES[30:], NAMES[:2]]))
        story.append(("frame", draw(st.integers(0, 1)), draw(st.sampled_from([1, 1, 2])), steps, names))
        if draw(st.booleans()):
            story.append(("compact", 0, 0, [], []))
    return story


@pytest.mark.parametrize("examples", [3, pytest.param(10, marks=pytest.mark.long)])
def test_any_story_of_wide_frames_is_answered_as_if_nothing_had_been_compacted(shelf, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(story=stories(), resume=st.sampled_from([0, 1000, 10**6]))
    def holds(story: list, resume: int) -> None:
        answered_as_if_nothing_had_been_compacted(shelf, story, resume)

    holds()


def answered_as_if_nothing_had_been_compacted(shelf, story: list, resume: int) -> None:
    number = next(numbers)
    compacted, waiting = f"compacted{number}", f"waiting{number}"
    for run in (compacted, waiting):
        for attempt, start in ((1, 0), (2, resume)):
            shelf.append(frame(1, state("starting", start_step=start), run=run, attempt=attempt))
        for at, (kind, rank, attempt, steps, names) in enumerate(story):
            if kind == "frame":
                times = [BEGIN + 0.25 * step + 0.001 * at for step in steps]
                piece = rows(wide(steps, seed=at, names=names), steps, times)
                shelf.append(frame(at + 2, piece, run=run, rank=rank, attempt=attempt))
            elif run == compacted:
                shelf.compact()
        if run == compacted:
            shelf.compact()
    expected = answers(shelf, waiting, cut=resume == 1000)
    assert answers(shelf, compacted, cut=resume == 1000) == expected
    shelf.compact()  # the other run as well, all of it in one go
    assert answers(shelf, waiting, cut=resume == 1000) == expected


def test_a_block_with_room_is_a_bundle_and_a_full_one_a_row_for_each_series(shelf) -> None:
    for seq in range(1, 5):
        steps = range((seq - 1) * 300, seq * 300)
        shelf.append(frame(seq, rows(wide(steps, seed=seq), steps)))
        shelf.compact()
        full = seq == 4
        assert count(shelf, tables.block) == (70 if full else 0)
        assert count(shelf, tables.bundle) == (2 if full else math.ceil(46 / max(32, 32768 // (300 * seq))) + 1)
    with shelf.database.read() as connection:
        assert connection.execute(select(func.sum(tables.bundle.c.samples))).scalar() == (1200 - 1024) * 70
        assert connection.execute(select(tables.block.c.samples).distinct()).scalars().all() == [1024]
    for name in ("m0", "m1"):
        kept = [row.value for row in shelf.store.samples("r1") if row.name == name]
        assert kept == [
            value for seq in range(1, 5) for value in wide(range(300), seed=seq)[name].astype("f8").tolist()
        ]


def test_few_series_are_no_bundle(shelf) -> None:
    few = NAMES[: BUNDLE_SERIES - 1]
    shelf.append(frame(1, rows(wide([1, 2], names=few), [1, 2])))
    shelf.compact()
    assert (count(shelf, tables.block), count(shelf, tables.bundle)) == (BUNDLE_SERIES - 1, 0)


def test_series_that_go_on_elsewhere_leave_their_bundle_and_others_stay(shelf) -> None:
    shelf.append(
        frame(1, rows(wide([1, 2], names=NAMES[:40]), [1, 2])), frame(2, rows(wide([1, 2], names=NAMES[40:]), [1, 2]))
    )
    shelf.append(frame(3, rows(wide([1], names=[f"n{at}" for at in range(50)]), [1])))
    shelf.compact()
    with shelf.database.read() as connection:
        before = connection.execute(select(tables.bundle.c.id)).scalars().all()
    shelf.append(frame(4, rows({"m0": [5.0]}, [3])))
    shelf.compact()
    with shelf.database.read() as connection:
        after = connection.execute(select(tables.bundle.c.id)).scalars().all()
    assert len(set(before) & set(after)) == len(before) - 1
    assert [row.step for row in shelf.store.samples("r1") if row.name == "m0"] == [1, 2, 3]
    assert [row.step for row in shelf.store.samples("r1") if row.name == "m1"] == [1, 2]
    assert shelf.store.latest("r1")["m0"].value == 5.0


def test_old_bundles_become_blocks_with_cells_and_charts_stay_exact(shelf) -> None:
    """Also where series have blocks in an older group, whose rollups were to be made when a newer one begins."""
    steps = range(15_000, 17_000)
    sent = wide(steps)
    for seq, part in enumerate([slice(0, 1384), slice(1384, 2000)], 1):
        shelf.append(frame(seq, rows({name: value[part] for name, value in sent.items()}, steps[part])))
        shelf.compact()
    assert count(shelf, tables.bundle) > 0
    asked = [{"points": 100}, {"points": 5}, {"points": 1}]
    before = [repr(shelf.store.series("r1", name, **how)) for name in NAMES for how in asked]
    newest = shelf.store.latest("r1")
    policy = RetentionPolicy(samples_days=30)
    shelf.append(frame(1, run="alive"), now=BEGIN + 39 * DAY_S)  # the clock is believed
    now = BEGIN + 20 * DAY_S
    retention = Retention(shelf.database, shelf.store, policy, clock=lambda: now, uptime=lambda: now)
    retention.run_once()
    assert count(shelf, tables.bundle) > 0
    now += 20 * DAY_S
    retention.run_once()
    assert (count(shelf, tables.bundle), count(shelf, tables.axis)) == (0, 0)
    assert count(shelf, tables.block) == retention.counters["blocks_thinned"] == 3 * 70
    assert [repr(shelf.store.series("r1", name, **how)) for name in NAMES for how in asked] == before
    assert shelf.store.latest("r1") == newest
    assert list(shelf.store.samples("r1")) == []
    shelf.append(frame(3, rows({name: [99.0] for name in NAMES}, [16_500])))  # a late piece still counts
    shelf.compact()
    assert max(shelf.store.series("r1", "m7", points=100).max) == 99.0
    assert sum(shelf.store.series("r1", "m7", points=5).count) == 2001


def test_bundles_of_many_series_are_thinned_one_a_job(shelf) -> None:
    for rank in range(4):
        shelf.append(frame(1, rows({f"m{at}": [1.0] for at in range(500)}, [1]), rank=rank))
    shelf.compact()
    shelf.append(frame(1, run="alive"), now=BEGIN + 39 * DAY_S)  # the clock is believed
    assert count(shelf, tables.bundle) == 4
    jobs: list[int] = []
    submit = shelf.database.submit

    def counted(job, *, essential: bool = False):
        def then(connection):
            before = connection.execute(select(func.count()).select_from(tables.block)).scalar_one()
            answer = job(connection)
            jobs.append(connection.execute(select(func.count()).select_from(tables.block)).scalar_one() - before)
            return answer

        return submit(then, essential=essential)

    shelf.database.submit = counted
    retention = Retention(
        shelf.database, shelf.store, RetentionPolicy(samples_days=30), clock=lambda: BEGIN + 40 * DAY_S
    )
    retention.run_once()
    assert [made for made in jobs if made] == [500] * 4


def test_what_retention_takes_while_it_is_compacted_is_compacted_anew(shelf) -> None:
    """A bundle that is gone when the compactor's job runs: nothing of the job is written, and its rows stay in the
    tail."""
    shelf.append(frame(1, rows(wide([1, 2]), [1, 2])))
    shelf.compact()
    shelf.append(frame(2, rows(wide([3], seed=2), [3])))
    compactor = Compactor(shelf.database, rules_enabled=False, policy=CompactionPolicy(samples=1))
    limits = compactor._look()
    compactor._gather(("r1", 0), limits[shard_of("r1")], whole_blocks=False)
    shelf.append(frame(1, run="alive"), now=BEGIN + 39 * DAY_S)  # the clock is believed
    Retention(
        shelf.database, shelf.store, RetentionPolicy(samples_days=30), clock=lambda: BEGIN + 40 * DAY_S
    ).run_once()
    compactor._work.ranks.append(("r1", 0))
    compactor._write()
    compactor._settle()
    assert (count(shelf, tables.tail), count(shelf, tables.bundle), count(shelf, tables.block)) == (1, 0, 70)
    assert compactor.run_once(everything=True) == 1
    assert count(shelf, tables.tail) == 0
    assert all(sum(shelf.store.series("r1", name, points=1).count) == 3 for name in NAMES)


def test_a_deleted_run_takes_its_bundles_along(shelf) -> None:
    for run in ("r1", "r2"):
        shelf.append(frame(1, rows(wide([1, 2]), [1, 2]), run=run))
    shelf.compact()
    shelf.store.delete("r1")
    with shelf.database.read() as connection:
        assert connection.execute(select(tables.bundle.c.run).distinct()).scalars().all() == ["r2"]
    assert len(exported(shelf, "r2")) == 140
    assert exported(shelf, "r1") == []
