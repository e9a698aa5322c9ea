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


def test_free_space_of_the_folders_that_count(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    sampler = FolderSampler(rows.append, tmp_path / "spool" / "not yet there")
    sampler.poll()
    free = shutil.disk_usage(tmp_path).free
    assert abs(rows[0]["disk/spool_free_bytes"] - free) < 0.05 * free
    assert 0 <= rows[0]["disk/work_used_pct"] <= 100
    assert not any(name.startswith("disk/checkpoint") for name in rows[0])
    folders.saved_to.append(str(tmp_path / "last.pt"))
    sampler.poll()
    assert rows[-1]["disk/checkpoint_free_bytes"] == rows[-1]["disk/spool_free_bytes"]
    assert rows[-1].keys() - CATALOGUE.keys() == set()


def test_checkpoints_that_go_to_an_address_are_on_no_disk(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    folders.saved_to.append("s3://bucket/run/last.pt")
    FolderSampler(rows.append, tmp_path).poll()
    assert not any(name.startswith("disk/checkpoint") for name in rows[0])


def test_a_file_system_without_a_size_is_absent(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    FolderSampler(rows.append, Path("/proc/self")).poll()
    assert not any(name.startswith("disk/spool") for name in rows[0])
