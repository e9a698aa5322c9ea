"""Projects of trackio 0.2 to 0.43, against trackio's own reading of them."""

from __future__ import annotations

import gzip
import json
import math
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent_client.history import OldRun, find_runs

DATA = Path(__file__).parents[2] / "data/history"
VERSIONS = ["trackio-0.2", "trackio-0.20", "trackio-0.43"]


def project(version: str, folder: Path, kind: str = ".db") -> Path:
    for file in (DATA / version).glob(f"*{kind}*"):
        if file.suffix == ".gz":
            (folder / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def runs_in(path: Path) -> list[OldRun]:
    return [run for source in find_runs([path]) for run in source.read()]


def as_read(run: OldRun) -> dict[str, list[tuple[int, str]]]:
    return {
        name: list(zip(one.step, [value.hex() for value in one.value], strict=True)) for name, one in run.series.items()
    }


def as_told(version: str, name: str) -> dict[str, list[tuple[int, str]]]:
    """trackio's own rows; its nested values under their place, and those of the system numbered."""
    told = json.loads((DATA / version / "truth.json").read_text())
    series: dict[str, list[tuple[int, str]]] = {}
    for row in told[name]:
        for key, value in {**row, **{f"nested/{key}": value for key, value in row.get("nested", {}).items()}}.items():
            if key in ("loss", "train/acc", "nested/inside"):
                series.setdefault(key, []).append(
                    (row["step"], value if isinstance(value, str) else float(value).hex())
                )
    for number, row in enumerate(told.get("system", []) if name == "first" else []):
        series.setdefault("system/gpu/0/utilization", []).append((number, row["gpu/0/utilization"]))
    return series


@pytest.mark.parametrize("version", VERSIONS)
def test_a_project_reads_as_trackio_reads_it(version: str, tmp_path: Path) -> None:
    found = {run.name: run for run in runs_in(project(version, tmp_path))}
    assert as_read(found["first"]) == as_told(version, "first")
    steps = [*range(9), *range(10, 19)] if version != "trackio-0.2" else [*range(9)]
    assert set(steps) >= set(found["first"].series["loss"].step)
    told = json.loads((DATA / version / "truth.json").read_text())["second"]
    times = [datetime.fromisoformat(row["timestamp"]).timestamp() for row in told if "loss" in row]
    assert list(found["second"].series["loss"].time) == times


@pytest.mark.parametrize("version", VERSIONS)
def test_parquet_of_trackio_has_what_it_wrote(version: str, tmp_path: Path) -> None:
    """Older versions wrote nothing for a NaN."""
    found = {run.name: run for run in runs_in(project(version, tmp_path, ".parquet"))}
    told = as_told(version, "first")
    if version != "trackio-0.43":
        told = {name: [point for point in points if point[1] != "nan"] for name, points in told.items()}
    assert as_read(found["first"]) == told


def test_a_project_beside_its_parquet_is_read_once(tmp_path: Path) -> None:
    both = project("trackio-0.43", project("trackio-0.43", tmp_path), ".parquet")
    [source] = find_runs([both])
    assert len(source.paths) == 4
    assert [run.name for run in source.read()] == ["first", "second"]


@pytest.mark.parametrize("kind", [".db", ".parquet"])
def test_what_stands_around_a_trackio_run_comes_along(kind: str, tmp_path: Path) -> None:
    run, _ = runs_in(project("trackio-0.43", tmp_path, kind))
    assert run.project == "fish-and-chips"
    assert run.config == {"lr": 0.001, "opt": {"name": "adam"}, "odd": math.inf}
    assert run.started < run.ended
    counted = "2 histograms, 18 texts, 18 truth values"
    assert run.left_out == [f"values that are no numbers: {'2 alerts, ' if kind == '.db' else ''}{counted}"]


def test_the_same_run_has_the_same_source_each_time(tmp_path: Path) -> None:
    for version in VERSIONS:
        (tmp_path / version).mkdir()
        place = project(version, tmp_path / version)
        assert [run.source for run in runs_in(place)] == [run.source for run in runs_in(place)]
        assert len({run.source for run in runs_in(place)}) == len(runs_in(place))


def test_a_write_ahead_log_is_read_and_left_alone(tmp_path: Path) -> None:
    place = project("trackio-0.43", tmp_path)
    [file] = place.iterdir()
    with closing(sqlite3.connect(file)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("UPDATE metrics SET metrics = '{\"loss\": 42}' WHERE step = 0")
        writer.commit()
        copied = tmp_path / "copied"
        copied.mkdir()
        for one in place.glob("*.db*"):
            if not one.name.endswith("-shm"):
                (copied / one.name).write_bytes(one.read_bytes())
    before = sorted(copied.iterdir())
    assert len(before) == 2
    assert [sorted(source.paths) for source in find_runs([copied])] == [before]
    assert runs_in(copied)[0].series["loss"].value[0] == 42.0
    assert sorted(copied.iterdir()) == before


def test_a_transaction_of_a_killed_writer_is_rolled_back(tmp_path: Path) -> None:
    place = project("trackio-0.2", tmp_path)
    [file] = place.iterdir()
    whole = [as_read(run) for run in runs_in(place)]
    killed = tmp_path / "killed"
    killed.mkdir()
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("BEGIN")
        writer.executemany(
            "UPDATE metrics SET metrics = ? WHERE id = ?", [("x" * 9000, number) for number in range(27)]
        )
        for one in place.glob("*.db*"):
            (killed / one.name).write_bytes(one.read_bytes())
        writer.execute("ROLLBACK")
    assert (killed / "fish-and-chips.db-journal").exists()
    assert [as_read(run) for run in runs_in(killed)] == whole


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_project_gives_what_is_whole(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = project(data.draw(st.sampled_from(VERSIONS)), tmp_path_factory.mktemp("cut"))
    [file] = place.iterdir()
    whole = {run.source: run for run in runs_in(place)}
    file.write_bytes(file.read_bytes()[: data.draw(st.integers(0, file.stat().st_size - 1))])
    found = runs_in(place)
    for run in found:
        for name, samples in run.series.items():
            full = whole[run.source].series[name]
            assert samples.step == full.step[: len(samples)]
            assert samples.value.tobytes() == full.value[: len(samples)].tobytes()
    assert not found or found[0].left_out


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_flipped_bytes_of_trackio_never_crash(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    kind = data.draw(st.sampled_from([".db", ".parquet"]))
    place = project(data.draw(st.sampled_from(VERSIONS)), tmp_path_factory.mktemp("flip"), kind)
    for file in place.iterdir():
        content = bytearray(file.read_bytes())
        for at in data.draw(st.lists(st.integers(0, len(content) - 1) | st.integers(0, 999), min_size=1, max_size=20)):
            content[at] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
    runs_in(place)
