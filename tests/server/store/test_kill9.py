from __future__ import annotations

import contextlib
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfagent_server.database import open_database
from perfagent_server.store.sql import SqlStore

WRITER = str(Path(__file__).with_name("kill_writer.py"))


def life(place, first: int, frames: int, pause_s: float) -> int:
    """A process that stores frames from `first` on and is killed after so many; answers the last that it acknowledged."""
    arguments = [sys.executable, WRITER, str(place.data), place.database or "", "s", str(first)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == "ready"
        last = [int(writer.stdout.readline()) for _ in range(frames)][-1]
        # not to wait for anything: to be killed at any point of the next transaction
        time.sleep(pause_s)
        writer.kill()
        rest = [int(line) for line in writer.stdout if line.endswith("\n")]
    return [last, *rest][-1]


@pytest.mark.real
@pytest.mark.fault
@pytest.mark.parametrize("kills", [3, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_s01_kill_9_loses_and_doubles_nothing_acknowledged(place, kills: int) -> None:
    """Compactor included: it runs all the time while the process is killed."""
    chance = random.Random(11)
    acknowledged = 0
    for kill in range(kills):
        # Every life starts with the frame after the last ack: a frame that was stored but not acknowledged comes twice.
        acknowledged = life(place, acknowledged + 1, chance.randrange(1, 40), chance.random() * 0.01)
        if place.database is None:
            with contextlib.closing(sqlite3.connect(place.data / "perfagent.db")) as connection:
                assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",), f"after kill {kill + 1}"
    with contextlib.closing(open_database(place, reserve_bytes=1 << 12)) as database:
        samples: dict[str, list[tuple[int, float]]] = {"loss": [], "many/7": []}
        for row in SqlStore(database).samples("r"):
            samples.setdefault(row.name, []).append((row.step, row.value))
    assert samples["many/7"] == samples["loss"]
    stored = len(samples["loss"]) // 4  # frames; at most the last one was stored without its ack having been read
    assert samples["loss"] == [(step, step // 4) for step in range(4, 4 * stored + 4)], "missing, doubled or wrong"
    assert acknowledged <= stored <= acknowledged + 1
