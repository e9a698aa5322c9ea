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


@pytest.mark.fault
@pytest.mark.parametrize("kills", [4, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_s01_kill_9_at_any_moment_loses_nothing_acknowledged_and_doubles_nothing(place, kills: int) -> None:
    """Compactor included: it runs all the time while the process is killed."""
    chance = random.Random(11)
    acknowledged = 0
    for kill in range(kills):
        # Every life starts with the frame after the last ack: a frame that was stored but not acknowledged comes twice.
        writer = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("kill_writer.py")),
                str(place.data),
                place.database or "",
                "s",
                str(acknowledged + 1),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline().strip() == "ready"
        frames = chance.randrange(1, 40)
        for line in writer.stdout:
            acknowledged = int(line)
            frames -= 1
            if not frames:
                break
        # not to wait for anything: to be killed at any point of the next transaction
        time.sleep(chance.random() * 0.01)
        writer.kill()
        for line in writer.stdout:
            if line.endswith("\n"):
                acknowledged = int(line)
        writer.wait(30)
        writer.stdout.close()
        if place.database is None:
            with contextlib.closing(sqlite3.connect(place.data / "perfagent.db")) as connection:
                assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",), f"after kill {kill + 1}"
    database = open_database(place, reserve_bytes=1 << 12)
    samples = {"loss": [], "many/7": []}
    for row in SqlStore(database).samples("r"):
        if row.name in samples:
            samples[row.name].append((row.step, row.value))
    stored = samples["loss"]
    assert samples["many/7"] == stored
    assert stored == sorted(set(stored)), "a sample is doubled"
    steps = {step for step, _ in stored}
    missing = set(range(4, acknowledged * 4 + 4)) - steps
    assert not missing, f"{len(missing)} of {acknowledged * 4} acknowledged samples are missing"
    assert len(steps) - acknowledged * 4 <= 4  # at most the last frame was stored without its ack having been read
    assert [step for step, value in stored if step // 4 != value] == []
    print(f"\n{kills} kills, {acknowledged * 4} samples acknowledged, {len(stored)} stored, 0 missing, 0 doubled")
    database.close()
