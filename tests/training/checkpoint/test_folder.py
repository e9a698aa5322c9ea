"""How checkpoints come and go on disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from perfagent.errors import CheckpointError
from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.folder import Folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".in_use")


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3,), float(step))}}


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, keep=2, best="min")
    for step, metric in enumerate([3.0, 1.0, 2.0, 1.5, 1.0], start=1):
        checkpoint.save(step, state(step), metric=metric)
    assert names(tmp_path) == ["best", "latest", "step_4", "step_5"]  # of equal ones the newer
    assert (tmp_path / "best").read_text() == "step_5\n"
    checkpoint.save(6, state(6), metric=4.0)
    checkpoint.save(7, state(7), metric=float("nan"))
    checkpoint.save(8, state(8))
    assert names(tmp_path) == ["best", "latest", "step_5", "step_7", "step_8"]


def test_best_may_be_the_greatest(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, keep=1, best="max")
    for step, metric in enumerate([0.5, 0.9, 0.7], start=1):
        checkpoint.rate(metric)
        checkpoint.save(step, state(step))
    assert names(tmp_path) == ["best", "latest", "step_2", "step_3"]


@pytest.mark.parametrize("dies_at", range(1, 14))
def test_whenever_the_writer_dies_a_whole_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """Each call that makes something last, or renames, is once the last thing that the writer does. Step 2 is saved
    again."""
    checkpoint = Checkpoint(tmp_path / "runs", keep=1)
    checkpoint.save(2, state(1))
    calls = 0

    class Died(BaseException): ...

    def dying(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= dies_at:
                raise Died
            return real(*args, **kwargs)

        return call

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    with contextlib.suppress(Died):
        checkpoint.save(2, state(2))
    monkeypatch.undo()
    assert calls >= dies_at, "each of these is a call"
    found = Checkpoint(tmp_path / "runs").load_latest()
    assert found is not None
    assert found[1]["model"]["weight"][0] in (1.0, 2.0)
    Checkpoint(tmp_path / "runs", keep=1).save(3, state(3))
    assert names(tmp_path / "runs") == ["latest", "step_3"], "what a dead writer left behind is cleared away"


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, state(1))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    for owner, name, instead, said in (
        (shutil, "disk_usage", lambda path: usage, r"no room for the checkpoint of step 2: it needs .* free"),
        (os, "fsync", full, "No space left on device"),  # seen in the middle
    ):
        with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=said):
            patched.setattr(owner, name, instead)
            checkpoint.save(2, state(2))
        assert names(tmp_path) == ["latest", "step_1"]
    checkpoint.save(2, state(2))
    assert checkpoint.latest() == tmp_path / "step_2"


def test_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "mine.txt").write_text("mine")
    (tmp_path / "notes").mkdir()
    checkpoint = Checkpoint(tmp_path, keep=1)
    for step in (2, 3):
        checkpoint.save(step, state(step))
    assert (tmp_path / "step_1" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "notes").is_dir()
    assert Folder(tmp_path).candidates()[0][0].name == "step_3"
