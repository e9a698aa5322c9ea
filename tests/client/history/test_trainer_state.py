"""trainer_state.json of real Trainers, equal to Transformers' own reading; and cut at any byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent_client.history import OldRun, find_runs

FIXTURES = Path(__file__).parents[2] / "data" / "history"
VERSIONS = ("transformers-4.57", "transformers-5.23")
WHOLE = (FIXTURES / VERSIONS[1] / "out" / "trainer_state.json").read_bytes()


def read(path: Path) -> list[OldRun]:
    return [run for source in find_runs([path]) for run in source.read()]


def exact(run: OldRun) -> dict[str, list[list[object]]]:
    return {
        name: [[step, value.hex()] for step, value in zip(one.step, one.value, strict=True)]
        for name, one in run.series.items()
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_equal_those_of_transformers_to_the_bit(version: str) -> None:
    [run] = read(FIXTURES / version / "out")
    assert exact(run) == json.loads((FIXTURES / version / "truth.json").read_text())
    assert (run.name, run.state, run.config["max_steps"]) == ("out", "finished", 18)
    assert run.left_out == ["9 values of `note` that are no numbers"]


def test_checkpoints_of_a_folder_are_one_run_the_newest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(FIXTURES / VERSIONS[0] / "out", out)
    [whole] = read(tmp_path)
    (out / "trainer_state.json").unlink()
    [newest] = read(tmp_path)
    assert newest.series["loss"].step == whole.series["loss"].step
    [named] = read(out / "checkpoint-12")
    assert (named.series["loss"].step[-1], named.name, named.source) == (12, "out", newest.source)


def test_older_checkpoint_stands_in_for_a_damaged_newest(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(FIXTURES / VERSIONS[0] / "out", out)
    (out / "trainer_state.json").unlink()
    (out / "checkpoint-18" / "trainer_state.json").write_bytes(b"{")
    [run] = read(out)
    assert run.series["loss"].step[-1] == 12 and run.left_out == ["6 values of `note` that are no numbers"]


@settings(deadline=None)
@given(st.integers(0, len(WHOLE) - 1))
def test_file_cut_at_any_byte_has_whole_rows_and_says_so(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    file = tmp_path_factory.mktemp("cut") / "trainer_state.json"
    file.write_bytes(WHOLE[:size])
    [run] = read(file)
    [whole] = read(FIXTURES / VERSIONS[1] / "out" / "trainer_state.json")
    for name, samples in run.series.items():
        assert exact(run)[name] == exact(whole)[name][: len(samples)]
    if size < len(WHOLE.rstrip()):
        assert "is cut or damaged" in run.left_out[-1]


@settings(deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 7))
def test_flipped_bit_is_no_crash(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    file = tmp_path_factory.mktemp("flip") / "trainer_state.json"
    data = bytearray(WHOLE)
    data[at] ^= 1 << bit
    file.write_bytes(data)
    assert len(read(file)) == 1


@pytest.mark.parametrize("text", ["", "[]", "null", '{"log_history": 5}', '{"log_history": [1, {"loss": 1}]}', "{}"])
def test_json_of_another_form_is_said_to_have_no_rows(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(text)
    [run] = read(file)
    assert not run.series and run.left_out
