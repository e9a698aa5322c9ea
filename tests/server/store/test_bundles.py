"""Bundles: what many series have in a block with room lies in one row, and no question can tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from frames import BEGIN, frame, rows
from sqlalchemy import func, select

from perfagent_server.store import tables
from perfagent_server.store.codec.wide_blocks import BUNDLE_SERIES
from perfagent_server.store.retention import DAY_S

pytestmark = pytest.mark.blocks

NAMES = [f"m{at}" for at in range(70)]


def wide(steps: Sequence[int], *, seed: int = 0, names: Sequence[str] = NAMES) -> dict[str, np.ndarray]:
    """A column for each name; every third one needs float64. All sums are exact, in whatever order they are made."""
    made = np.random.default_rng(seed).standard_normal((len(names), len(steps)))
    fine, coarse = np.round(made * 2**35) / 2**35, np.round(made * 2**10).astype("f4") / 2**10
    return {name: fine[at] if at % 3 == 0 else coarse[at] for at, name in enumerate(names)}


def send(shelf, seq: int, steps: Sequence[int], names: Sequence[str] = NAMES, **more) -> None:
    shelf.append(frame(seq, rows(wide(steps, seed=seq, names=names), steps), **more))


def held(shelf) -> tuple[int, int]:
    """How many blocks and bundles there are."""
    return shelf.count(tables.block), shelf.count(tables.bundle)


def test_a_block_with_room_is_a_bundle_and_a_full_one_rows(shelf) -> None:
    for seq in range(1, 5):
        send(shelf, seq, range((seq - 1) * 300, seq * 300))
        shelf.compact()
        rows_of_narrow = math.ceil(46 / max(32, 32768 // (300 * seq)))
        assert held(shelf) == ((70, 2) if seq == 4 else (0, rows_of_narrow + 1))
    assert shelf.ask(select(func.sum(tables.bundle.c.samples))) == [(1200 - 1024) * 70]
    assert shelf.ask(select(tables.block.c.samples).distinct()) == [1024]
    for name in ("m0", "m1"):
        sent = np.concatenate([wide(range(300), seed=seq)[name] for seq in range(1, 5)]).astype("f8")
        assert [value for _, value in shelf.samples(name=name)] == sent.tolist()
    send(shelf, 1, [1, 2], NAMES[: BUNDLE_SERIES - 1], run="few")  # too few series for a bundle
    shelf.compact()
    assert held(shelf) == (70 + BUNDLE_SERIES - 1, 2)


@pytest.mark.sql
def test_old_bundles_become_cells_and_charts_stay_exact(shelf) -> None:
    """Also where series have blocks in an older group, whose rollups were to be made when a newer one begins."""
    for seq, steps in enumerate([range(15_000, 16_384), range(16_384, 17_000)], 1):
        send(shelf, seq, steps)
        shelf.compact()
    asked = [{"points": 100}, {"points": 5}, {"points": 1}]
    before = [repr(shelf.store.series("r1", name, **how)) for name in NAMES[:9] for how in asked]
    newest = shelf.store.latest("r1")
    shelf.append(frame(1, run="alive"), now=BEGIN + 39 * DAY_S)  # the clock is believed
    retention = shelf.retention(samples_days=30)
    shelf.pass_by(20 * DAY_S)
    retention.run_once()
    assert shelf.count(tables.bundle) > 0
    shelf.pass_by(20 * DAY_S)
    retention.run_once()
    assert (held(shelf), shelf.count(tables.axis)) == ((3 * 70, 0), 0)
    assert retention.counters["blocks_thinned"] == 3 * 70
    assert [repr(shelf.store.series("r1", name, **how)) for name in NAMES[:9] for how in asked] == before
    assert shelf.store.latest("r1") == newest
    assert list(shelf.store.samples("r1")) == []
    shelf.append(frame(3, rows({name: [99.0] for name in NAMES}, [16_500])))  # a late piece still counts
    shelf.compact()
    assert max(shelf.store.series("r1", "m7", points=100).max) == 99.0
    assert sum(shelf.store.series("r1", "m7", points=5).count) == 2001
