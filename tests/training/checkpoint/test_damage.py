"""A checkpoint damaged in any byte is found, and the one before is used."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent.errors import CheckpointError
from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.folder import Folder
from perfagent_loop.manifest import Manifest, sum_of


def state(step: int) -> dict[str, object]:
    return {
        "model": {"weight": torch.full((7,), float(step))},
        "rng": {"torch": torch.arange(5)},
        "loop": {"step_count": step},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoint = Checkpoint(folder)
    checkpoint.save(1, state(1))
    checkpoint.save(2, state(2))
    return folder


@pytest.fixture(scope="module")
def places(saved: Path) -> list[tuple[str, int]]:
    return [(path.name, path.stat().st_size) for path in sorted((saved / "step_2").iterdir())]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found_and_the_checkpoint_before_is_used(
    saved: Path, places: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name, size = data.draw(st.sampled_from(places))
    what = data.draw(st.sampled_from(["changed", "changed", "changed", "cut", "longer", "lost", "added"]))
    offset, change = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255))
    folder = tmp_path_factory.mktemp("damaged") / "runs"
    shutil.copytree(saved, folder)
    path = folder / "step_2" / name
    content = path.read_bytes()
    if what == "lost":
        path.unlink()
    elif what == "added":
        (folder / "step_2" / "rank_7.pt").write_bytes(b"")
    else:
        changed = content[:offset] + bytes([content[offset] ^ change]) + content[offset + 1 :]
        path.write_bytes({"changed": changed, "cut": content[:offset], "longer": content + b"\0"}[what])
    found = Checkpoint(folder).load_latest()
    shutil.rmtree(folder)
    assert found is not None
    assert found[0] == 1
    assert torch.equal(found[1]["model"]["weight"], torch.full((7,), 1.0))


@pytest.fixture
def runs(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "runs"))


def test_what_was_passed_over_is_told(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = runs / "step_2" / "shared.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "perfagent"):
        assert Checkpoint(runs).latest() == runs / "step_1"
    assert "shared.pt in step_2 has" in caplog.text
    assert "step_1 is used instead" in caplog.text
    for step in (1, 2):
        (runs / f"step_{step}" / "manifest.json").write_bytes(b"{}")
    with caplog.at_level(logging.WARNING, "perfagent"):
        assert Checkpoint(runs).load_latest() is None
    assert "training starts anew" in caplog.text
    assert {path.name for path in runs.iterdir()} >= {"step_1", "step_2"}  # nothing is thrown away


def test_a_damaged_or_lost_pointer_changes_nothing(runs: Path) -> None:
    assert (runs / "latest").read_text() == "step_2\n"
    (runs / "latest").write_text("step_1\n")
    assert Checkpoint(runs).latest() == runs / "step_2"
    (runs / "latest").unlink()
    assert Checkpoint(runs).latest() == runs / "step_2"


@pytest.mark.fault
def test_x04_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    folder = Folder(tmp_path / "runs")
    tmp = folder.begin(1, 0)
    torch.save({"model": Evil()}, tmp / "shared.pt")
    torch.save({}, tmp / "rank_0.pt")
    files = {name: sum_of(tmp / name) for name in folder.files(tmp)}
    folder.commit(tmp, Manifest(step=1, number=1, kind="plain", world_size=1, reason="asked", created=0.0, files=files))
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        Checkpoint(tmp_path / "runs").load_latest()
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_an_engine_fits_only_as_many_ranks(saved: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    tmp = folder.begin(1, 0)
    manifest = Manifest(step=1, number=1, kind="deepspeed", world_size=2, reason="asked", created=0.0, files={})
    folder.commit(tmp, manifest)
    with pytest.raises(CheckpointError, match=r"saved by 2 ranks under DeepSpeed.* here are 1: start 2"):
        Checkpoint(tmp_path).load_latest(engine=object())
    with pytest.raises(CheckpointError, match="pass engine="):
        Checkpoint(tmp_path).load_latest()
    with pytest.raises(CheckpointError, match="without DeepSpeed: load it without engine="):
        Checkpoint(saved).load_latest(engine=object())


def test_a_damaged_checkpoint_is_none_of_those_that_are_kept(runs: Path) -> None:
    damaged = runs / "step_2" / "shared.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    checkpoint = Checkpoint(runs, keep=2)
    assert checkpoint.load_latest()[0] == 1  # type: ignore[index]
    checkpoint.save(3, state(3))
    assert {path.name for path in runs.glob("step_*")} == {"step_1", "step_2", "step_3"}  # one to fall back to
    checkpoint.save(4, state(4))
    assert {path.name for path in runs.glob("step_*")} == {"step_3", "step_4"}
