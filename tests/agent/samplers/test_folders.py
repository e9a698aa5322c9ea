"""Free space of the folders that a run writes into."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from perfagent.samplers import folders
from perfagent.samplers.folders import FolderSampler
from perfagent.wire import CATALOGUE


@pytest.fixture(autouse=True)
def _nothing_saved() -> None:
    folders.saved_to.clear()


def polled(spool: Path) -> dict[str, float]:
    rows: list[dict[str, float]] = []
    FolderSampler(rows.append, spool).poll()
    return rows[0]


def test_free_space_of_the_folders_that_count(tmp_path: Path) -> None:
    told, free = polled(tmp_path / "spool" / "not yet there"), shutil.disk_usage(tmp_path).free
    assert abs(told["disk/spool_free_bytes"] - free) < 0.05 * free
    assert 0 <= told["disk/work_used_pct"] <= 100
    assert not any(name.startswith("disk/checkpoint") for name in told)
    folders.saved_to.append(str(tmp_path / "last.pt"))
    told = polled(tmp_path)
    assert told["disk/checkpoint_free_bytes"] == told["disk/spool_free_bytes"]
    assert told.keys() <= CATALOGUE.keys()
