"""Files with the columns of neptune-exporter, against what was written into them."""

from __future__ import annotations

import json
import shutil
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent.errors import ResourceError
from perfagent_client.history import OldRun, find_runs

DATA = Path(__file__).parents[2] / "data/history/neptune"
FIRST, FORK = "neptune:team/fish/brave-fish", "neptune:team/fish/calm-fish"


def runs_in(path: Path) -> dict[str, OldRun]:
    return {run.source: run for source in find_runs([path]) for run in source.read()}


def test_each_value_of_a_neptune_export_is_there() -> None:
    found = runs_in(DATA)
    assert found.keys() == {FIRST, FORK}
    told: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
    for run, path, step, time, value in json.loads((DATA / "truth.json").read_text()):
        factor = 1000 if path.startswith("epochs/") else 1
        told.setdefault((f"neptune:team/fish/{run}", path), []).append((int(Decimal(step) * factor), time, value))
    for (source, path), points in told.items():
        samples = found[source].series[path]
        values = [value.hex() for value in samples.value]
        assert list(zip(samples.step, samples.time, values, strict=True)) == points
    assert sum(run.points for run in found.values()) == sum(map(len, told.values()))


def test_what_stands_around_a_neptune_run_comes_along() -> None:
    run = runs_in(DATA)[FIRST]
    assert (run.name, run.project, run.group, run.notes) == ("brave-fish", "team/fish", "chips", "two\nlines")
    assert (run.tags, run.state, run.started, run.meta["user"]) == (["b", "a", "g"], "failed", 1735689600.0, "ada")
    assert run.config == {
        "parameters/lr": 0.1 + 0.2,
        "parameters/layers": 12,
        "parameters/amp": True,
        "parameters/names": ["x", "y"],
        "parameters/day": "2025-01-01T00:00:00+00:00",
    }
    assert run.console == ["line 0", "line 1", "line 2"]
    assert run.left_out[0] == "values that are no numbers: 1 file, 1 histogram, 2 texts"


def test_fractions_of_steps_become_whole_and_are_said() -> None:
    run = runs_in(DATA)[FIRST]
    assert list(run.series["epochs/loss"].step) == list(range(0, 2250, 250))
    assert list(run.series["epochs/accuracy"].step) == list(range(0, 1125, 125))
    assert list(run.series["train/loss"].step) == list(range(109))
    assert run.meta["steps_multiplied_by"] == 1000
    assert "fractions of steps: those of epochs/accuracy, epochs/loss are multiplied by 1,000" in run.left_out


def test_a_fork_names_the_run_it_goes_on_from() -> None:
    fork = runs_in(DATA)[FORK]
    assert fork.meta["forked_from"] == {"run": "brave-fish", "step": 50.0}
    assert list(fork.series["train/loss"].step) == list(range(51, 60))
    assert any("brave-fish" in text for text in fork.left_out)


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.lib", None)
    with pytest.raises(ResourceError, match=r"needs pyarrow; .*\.\[history\]"):
        runs_in(DATA)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_cut_part_of_neptune_is_said_and_others_read(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    shutil.copytree(DATA, folder, dirs_exist_ok=True)
    whole = runs_in(folder)
    [last] = folder.rglob("*_part_1.parquet")
    last.write_bytes(last.read_bytes()[: data.draw(st.integers(0, last.stat().st_size - 1))])
    found = runs_in(folder)
    assert found.keys() == whole.keys()
    assert found[FIRST].series["train/loss"].value.tobytes() == whole[FIRST].series["train/loss"].value[:9].tobytes()
    assert any(last.name in text for text in found[FIRST].left_out)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_flipped_bytes_of_neptune_never_crash(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flip")
    shutil.copytree(DATA, folder, dirs_exist_ok=True)
    [file] = folder.rglob("brave*_part_0.parquet")
    content = bytearray(file.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=20)):
        content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    runs_in(folder)
