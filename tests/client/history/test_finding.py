"""Which files and folders are looked into; what may not be read, and links."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perfagent.errors import ConfigError
from perfagent_client.history import find_runs

TABLE = "step,loss\n1,2\n2,1\n"
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Into which everybody may look, unlike pytest's own."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    for one in made.rglob("*"):
        if one.is_dir():
            one.chmod(0o755)
    shutil.rmtree(made)


@contextmanager
def no_root(folder: Path) -> Iterator[None]:
    """Who may read everything anyway."""
    found(folder)  # imports what it needs: Python's own files may be closed to others, too
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def found(*paths: Path) -> tuple[list[str], dict[str, str]]:
    """The names of runs; the files that cannot be read, and why."""
    names, closed = [], {}
    for source in find_runs(paths):
        try:
            names.extend(run.name for run in source.read())
        except OSError as error:
            closed[Path(error.filename or source.paths[0]).name] = error.strerror or ""
    return names, closed


def table(path: Path, mode: int = 0o644) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(TABLE)
    path.chmod(mode)
    return path


def test_what_may_not_be_read_is_said_and_the_rest_is_read(folder: Path) -> None:
    table(folder / "open.csv")
    for name in ("a.csv", "b.log", "c.json"):
        table(folder / name, 0)
    for name, mode in (("locked", 0), ("listed", 0o444), ("deep", 0o755)):
        table(folder / name / "inside.csv", 0 if name == "deep" else 0o644)
        (folder / name).chmod(mode)
    (folder / "into").symlink_to(folder / "locked" / "inside.csv")
    with no_root(folder):
        names, closed = found(folder)
        assert names == ["open"]
        assert closed.keys() == {"a.csv", "locked", "listed", "inside.csv"}
        assert closed["a.csv"] == "permission denied; nor can 2 files beside it"
        assert found(folder / "a.csv") == ([], {"a.csv": "permission denied"})
        assert found(folder / "locked")[1].keys() == {"locked"}
        assert found(folder / "locked" / "inside.csv")[1].keys() == {"inside.csv"}
    for path in (folder / "gone", folder / "open.csv" / "below"):
        with pytest.raises(ConfigError):
            found(path)


def test_one_closed_run_does_not_hide_its_experiment(folder: Path) -> None:
    for name in ("one", "two", "three"):
        run = folder / "7" / name
        (run / "metrics").mkdir(parents=True)
        (run / "meta.yaml").write_text(f"run_id: {name}\nrun_name: {name}\nstatus: 3\n")
        (run / "metrics" / "loss").write_text("1000 2.5 1\n")
    (folder / "7" / "meta.yaml").write_text("experiment_id: '7'\nname: sea\n")
    (folder / "7" / "one" / "meta.yaml").chmod(0)
    (folder / "7" / "two" / "metrics" / "loss").chmod(0)
    with no_root(folder):
        assert found(folder) == (["three"], {"meta.yaml": "Permission denied"})


def test_linked_folder_is_named_and_not_looked_into(tmp_path: Path) -> None:
    table(tmp_path / "elsewhere" / "far.csv")
    here = tmp_path / "here"
    table(here / "near.csv")
    (here / "outputs").symlink_to(tmp_path / "elsewhere")
    (here / "latest").symlink_to(here)
    said: list[str] = []
    names = [run.name for source in find_runs([here], said.append) for run in source.read()]
    assert names == ["near"]
    assert said == [
        f"{here / 'outputs'} is a link to {tmp_path / 'elsewhere'}, which was not looked into; name it to have it read"
    ]
    assert found(here / "outputs") == (["far"], {})
