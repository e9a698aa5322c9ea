"""How checkpoints come and go on disk, and that a damaged one is passed over for the one before."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from perfagent.errors import CheckpointError
from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.folder import Folder
from perfagent_loop.manifest import Manifest


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".in_use"}


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((7,), float(step))}, "rng": {"torch": torch.arange(5)}}


def loaded(folder: Path) -> tuple[int, float]:
    """The step of the newest whole checkpoint, and a weight of it."""
    step, found = Checkpoint(folder).load_latest() or pytest.fail("there is none")
    return step, float(found["model"]["weight"][0])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    checkpoint = Checkpoint(tmp_path / "runs")
    for step in (1, 2):
        checkpoint.save(step, state(step))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("keep", "best", "metrics", "stay"),
    [
        (2, "min", [3.0, 1.0, 2.0, 1.5, 1.0], {"step_4", "step_5"}),  # of equal ones the newer
        (2, "min", [3.0, 1.0, 4.0, float("nan"), None], {"step_2", "step_4", "step_5"}),
        (1, "max", [0.5, 0.9, 0.7], {"step_2", "step_3"}),
    ],
)
def test_the_newest_and_the_best_stay(tmp_path: Path, keep: int, best: Any, metrics: list[Any], stay: set[str]) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "mine.txt").write_text("what others put there is left alone")
    checkpoint = Checkpoint(tmp_path, keep=keep, best=best)
    for step, metric in enumerate(metrics, start=2):
        if metric is not None:
            checkpoint.rate(metric)
        checkpoint.save(step, state(step))
    later = {f"step_{int(name[5:]) + 1}" for name in stay}
    assert names(tmp_path) == {"best", "latest", "step_1", *later}
    assert (tmp_path / "step_1" / "mine.txt").exists()
    assert (tmp_path / "best").read_text().strip() in later


@pytest.mark.parametrize("dies_at", range(1, 14))
def test_whenever_the_writer_dies_a_whole_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """Each call that makes something last, or renames, is once the last thing that the writer does. Step 2 is saved
    again."""
    checkpoint = Checkpoint(tmp_path, keep=1)
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
    assert loaded(tmp_path)[1] in (1.0, 2.0)
    Checkpoint(tmp_path, keep=1).save(3, state(3))
    assert names(tmp_path) == {"latest", "step_3"}, "what a dead writer left behind is cleared away"


def test_a_disk_without_room_is_seen_before_it_is_full(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(runs)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"no room for the checkpoint of step 3: it needs .* free"):
        Checkpoint(runs).save(3, state(3))
    assert names(runs) == {"latest", "step_1", "step_2"}


DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "joined by another": lambda path: path.with_name("rank_7.pt").touch(),
}


def flipped(path: Path, place: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["manifest.json", "shared.pt", "rank_0.pt"])
def test_any_damage_is_found_and_the_checkpoint_before_is_used(runs: Path, name: str) -> None:
    flips = [functools.partial(flipped, place=977 * number, bit=number % 8) for number in range(40)]
    for damage in (*DAMAGES.values(), *flips):
        shutil.copytree(runs, runs.with_name("damaged"))
        damage(runs.with_name("damaged") / "step_2" / name)
        assert loaded(runs.with_name("damaged")) == (1, 1.0)
        shutil.rmtree(runs.with_name("damaged"))


def test_what_is_passed_over_is_told_and_thrown_away_last(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert (runs / "latest").read_text() == "step_2\n"
    (runs / "latest").write_text("step_1\n")
    assert loaded(runs) == (2, 2.0), "a wrong pointer changes nothing"
    DAMAGES["cut"](runs / "step_2" / "shared.pt")
    checkpoint = Checkpoint(runs, keep=2)
    assert checkpoint.load_latest()[0] == 1  # type: ignore[index]
    assert "shared.pt in step_2 has" in caplog.text
    assert "step_1 is used instead" in caplog.text
    checkpoint.save(3, state(3))
    assert names(runs) == {"latest", "step_1", "step_2", "step_3"}  # one to fall back to
    checkpoint.save(4, state(4))
    assert names(runs) == {"latest", "step_3", "step_4"}
    for step in (3, 4):
        (runs / f"step_{step}" / "manifest.json").write_bytes(b"{}")
    assert Checkpoint(runs).load_latest() is None
    assert "training starts anew" in caplog.text
    assert names(runs) == {"latest", "step_3", "step_4"}


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("open('ran', 'w')",))


@pytest.mark.fault
def test_x04_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perfagent_loop.checkpoint.check_loadable", lambda state: None)
    Checkpoint(tmp_path).save(1, {"model": Evil()})
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        Checkpoint(tmp_path).load_latest()
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_an_engine_fits_only_as_many_ranks(runs: Path) -> None:
    with pytest.raises(CheckpointError, match="without DeepSpeed: load it without engine="):
        Checkpoint(runs).load_latest(engine=object())
    folder = Folder(runs)
    made: Any = {"step": 3, "number": 3, "kind": "deepspeed", "world_size": 2, "reason": "asked", "created": 0.0}
    folder.commit(folder.begin(3, 0), Manifest(**made, files={}))
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks under DeepSpeed.* here are 1: start 2"):
        Checkpoint(runs).load_latest(engine=object())
    with pytest.raises(CheckpointError, match="pass engine="):
        Checkpoint(runs).load_latest()
