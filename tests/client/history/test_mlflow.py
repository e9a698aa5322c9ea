"""Runs of MLflow 2 and 3, in a database and in files, against MLflow's own reading of them."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from old_mlflow import DATA, VERSIONS, database, files, runs_in

from perfagent.errors import ConfigError, ResourceError
from perfagent_client.history import OldRun
from perfagent_client.history.mlflow_store import from_uri


def read_back(run: OldRun) -> dict[str, Any]:
    """As MLflow tells it: clipped, in the order of its steps."""
    series = {
        name: sorted(
            [step, round(time * 1000), clipped(value)]
            for step, time, value in zip(samples.step, samples.time, samples.value, strict=True)
        )
        for name, samples in run.series.items()
    }
    return {"name": run.name, "experiment": run.project, "series": series}


def clipped(value: float) -> str:
    return (math.copysign(1.7976931348623157e308, value) if math.isinf(value) else value).hex()


def as_told(one: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": one["name"],
        "experiment": one["experiment"],
        "series": {
            name: sorted([step, time, clipped(float.fromhex(value))] for step, time, value in values)
            for name, values in one["series"].items()
        },
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["database", "files"])
def test_mlflow_reads_as_mlflow_does(version: str, kind: str, tmp_path: Path) -> None:
    found = runs_in({"database": database, "files": files}[kind](version, tmp_path).parent)
    told = json.loads((DATA / version / f"truth_{kind}.json").read_text())
    assert {run.removeprefix("mlflow:") for run in found} == {one["id"] for one in told}
    for one in told:
        run = found[f"mlflow:{one['id']}"]
        assert read_back(run) == as_told(one)
        assert {key: str(value) for key, value in run.config.items()} == one["params"]
        assert (run.started, run.ended) == (one["start"] / 1000, one["end"] and one["end"] / 1000)
        assert run.state == {"FINISHED": "finished", "KILLED": "failed", "RUNNING": "running"}[one["status"]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["database", "files"])
def test_what_stands_around_an_mlflow_run_comes_along(version: str, kind: str, tmp_path: Path) -> None:
    found = runs_in({"database": database, "files": files}[kind](version, tmp_path))
    first, child, going = sorted(found.values(), key=lambda run: run.started or 0)
    assert first.name.startswith('it\'s a "long" name: abc')
    assert first.tags == ["best", "team=vision"]
    assert first.notes == "two\nlines"
    assert first.meta == {"user": "ada", "script": "train.py", "git": {"commit": "c0ffee", "branch": "main"}}
    assert first.config["lr"] == 0.001
    assert first.config["amp"] is True
    assert (first.config["id"], first.config["opt/name"]) == ("007", "adam")
    assert child.group == f"{first.name} {first.source.removeprefix('mlflow:')[:8]}"
    assert going.project == "Default"
    assert [text for run in found.values() for text in run.left_out if "deleted" in text] == [
        f"1 run of the same {'database' if kind == 'database' else 'experiment'}, deleted in MLflow"
    ]


@pytest.mark.parametrize("kind", ["database", "files"])
def test_odd_numbers_and_restarts_of_mlflow_stay(kind: str, tmp_path: Path) -> None:
    found = runs_in({"database": database, "files": files}[kind]("mlflow-3.17", tmp_path))
    first = min(found.values(), key=lambda run: run.started or 0)
    zero = 0.0 if kind == "database" else -0.0  # SQLite has no -0.0
    odd = (0.1 + 0.2, math.nan, math.inf, -math.inf, 5e-324, zero, 1e308, 1 / 3, 3.0)
    assert [value.hex() for value in first.series["odd"].value] == [value.hex() for value in odd]
    loss = first.series["train/loss"]
    assert list(loss.step) == [*range(50), *range(40, 60), 59]
    assert loss.value[-1] == 7.25


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_cut_mlflow_database_gives_what_is_whole(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = database("mlflow-3.17", tmp_path_factory.mktemp("cut"))
    whole, size = runs_in(path), path.stat().st_size
    cut = data.draw(st.integers(0, size - 1))
    path.write_bytes(path.read_bytes()[:cut])
    check_prefix(runs_in(path), whole)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_cut_mlflow_files_give_what_is_whole(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = files("mlflow-3.17", tmp_path_factory.mktemp("cut"))
    whole = runs_in(folder)
    file = data.draw(st.sampled_from(sorted(folder.rglob("metrics/**/*"))))
    if file.is_file():
        cut = data.draw(st.integers(0, file.stat().st_size - 1))
        file.write_bytes(file.read_bytes()[:cut])
        if cut and file.read_bytes()[-1:] != b"\n":
            assert any(
                "are cut" in text or "is cut" in text for run in runs_in(folder).values() for text in run.left_out
            )
    check_prefix(runs_in(folder), whole)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_flipped_bytes_of_mlflow_never_crash(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = database("mlflow-2.9", tmp_path_factory.mktemp("flip"))
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1) | st.integers(0, 4095), min_size=1, max_size=30)):
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    runs_in(path)


def check_prefix(found: dict[str, OldRun], whole: dict[str, OldRun]) -> None:
    for source, run in found.items():
        for name, samples in run.series.items():
            full = whole[source].series[name]
            assert samples.step == full.step[: len(samples)]
            assert samples.value.tobytes() == full.value[: len(samples)].tobytes()
    lost = len(found) < len(whole) or any(
        run.points < whole[source].points for source, run in found.items() if run.points
    )
    assert not lost or not found or any(run.left_out for run in found.values())


def test_addresses_of_mlflow_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = database("mlflow-3.17", tmp_path)
    assert {run.source for run in from_uri(f"sqlite:///{path}")} == set(runs_in(path))
    for uri, said in (
        ("http://mlflow:5000", "http:// is no database"),
        ("sqlite:///none.db", "there is no file none.db"),
    ):
        with pytest.raises(ConfigError, match=said):
            list(from_uri(uri))
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(ResourceError, match=r"needs pymysql; .*\.\[history\]"):
        list(from_uri("mysql://me:secret@127.0.0.1/mlflow"))
    with pytest.raises(ResourceError, match="cannot be read") as error:
        list(from_uri("postgresql://me:secret@127.0.0.1:1/mlflow?connect_timeout=1"))
    assert "secret" not in str(error.value)
