"""Tables of steps, as Lightning, Keras, Ultralytics and scripts write them."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent_client.history import OldRun, find_runs

FIXTURES = Path(__file__).parents[2] / "data" / "history"
METRICS = (FIXTURES / "lightning-2.6/lightning_logs/version_0/metrics.csv").read_bytes()


def read(path: Path) -> list[OldRun]:
    return [run for source in find_runs([path]) for run in source.read()]


def table(folder: Path, text: str, name: str = "curve.csv") -> OldRun:
    (folder / name).write_text(text)
    [run] = read(folder / name)
    return run


def points(run: OldRun, name: str) -> list[tuple[int, float]]:
    return [*zip(run.series[name].step, run.series[name].value, strict=True)]


def test_lightning_values_equal_those_that_a_logger_got() -> None:
    [run] = read(FIXTURES / "lightning-2.6/lightning_logs")
    truth = json.loads((FIXTURES / "lightning-2.6/truth.json").read_text())
    assert run.name == "version_0"
    read_as = {name: [[step, value.hex()] for step, value in points(run, name)] for name in run.series}
    # its CSV has one row for what was logged together, so the epoch of a row is written once
    assert read_as.pop("epoch")[-1] == truth.pop("epoch")[-1]
    assert read_as == truth


def test_keras_log_equals_its_history() -> None:
    [run] = read(FIXTURES / "keras-3" / "log.csv")
    truth = json.loads((FIXTURES / "keras-3/truth.json").read_text())
    assert {name: [value.hex() for value in run.series[name].value] for name in truth} == truth
    assert list(run.series["loss"].step) == [0, 1, 2, 3, 4]


def test_padded_heads_of_ultralytics_are_read(tmp_path: Path) -> None:
    head = "                  epoch,      time,         train/box_loss,       val/box_loss,                 lr/pg0\n"
    run = table(tmp_path, head + "   1,  12.5,  1.25,  1.5, 0.003\n   2,  25.0,  1.0,  nan, 0.006\n", "results.csv")
    assert list(run.series) == ["time", "train/box_loss", "val/box_loss", "lr/pg0"]
    assert points(run, "train/box_loss") == [(1, 1.25), (2, 1.0)]
    assert math.isnan(run.series["val/box_loss"].value[1]) and math.isnan(run.series["lr/pg0"].time[0])


def test_empty_cells_are_no_values_and_text_is_counted(tmp_path: Path) -> None:
    run = table(tmp_path, "step,loss,note,lr\n1,3.5,,\n2,-Infinity,warm,0.1\n3,NaN,cold,\nx,1,,\n")
    assert points(run, "lr") == [(2, 0.1)]
    assert [repr(value) for _, value in points(run, "loss")] == ["3.5", "-inf", "nan"]
    assert run.left_out == ["2 values of `note` that are no numbers", "1 rows without a whole step"]


def test_times_of_day_are_read_as_seconds_or_milliseconds(tmp_path: Path) -> None:
    run = table(tmp_path, "step,timestamp,loss\n1,1700000000.5,3\n2,1700000001.5,2\n")
    assert list(run.series["loss"].time) == [1_700_000_000.5, 1_700_000_001.5] and list(run.series) == ["loss"]
    lines = '{"step": 1, "timestamp": 1700000000500, "a": {"loss": 3}}\n{"step": 2, "a": {"loss": NaN, "why": "x"}}\n'
    run = table(tmp_path, lines, "log.jsonl")
    assert run.series["a/loss"].time[0] == 1_700_000_000.5 and math.isnan(run.series["a/loss"].time[1])
    assert run.left_out == ["1 values of `a/why` that are no numbers"]


def test_rows_are_counted_where_nothing_counts_them(tmp_path: Path) -> None:
    run = table(tmp_path, "train_loss,acc\n3,0.1\n2,0.2\n")
    assert points(run, "train_loss") == [(1, 3.0), (2, 2.0)] and "rows are counted" in run.left_out[0]


ROWS = [{"step": step, "loss": value} for step, value in enumerate((2.5, 0.1 + 0.2, math.inf))]


def test_a_json_list_of_objects_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    text = json.dumps(ROWS, indent=1)
    assert points(table(tmp_path, text, "log.json"), "loss") == [(0, 2.5), (1, 0.1 + 0.2), (2, math.inf)]
    run = table(tmp_path, text[:-3], "log.json")
    assert points(run, "loss") == [(0, 2.5), (1, 0.1 + 0.2)]
    assert run.left_out == ["the last 35 bytes are no whole JSON objects of the list"]
    of_runs = '[{"id": "a", "start": 1, "end": 2, "series": {"train/loss": [[3, 17, "0x1p-1"]]}}]'
    for other in (of_runs, '[{"name": "x", "size": 1}]', '{"step": 1, "loss": 2}', "[1, 2]", "[", ""):
        (tmp_path / "log.json").write_text(other)
        assert read(tmp_path) == []


def test_semicolons_are_between_cells_where_numbers_have_commas(tmp_path: Path) -> None:
    assert points(table(tmp_path, "step;loss\n1;1,5\n2;0,25\n"), "loss") == [(1, 1.5), (2, 0.25)]
    run = table(tmp_path, "step;loss;count\n1;1.5;1,234\n2;0.25;7\n")
    assert (points(run, "loss"), points(run, "count")) == ([(1, 1.5), (2, 0.25)], [(2, 7.0)])
    assert run.left_out == ["1 values of `count` that are no numbers"]


def test_settings_beside_a_table_are_the_config(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("lr0: 0.01\nmodel: yolo11n.pt\n")
    assert table(tmp_path, "epoch,train/box_loss\n1,2.5\n", "results.csv").config == {
        "lr0": 0.01,
        "model": "yolo11n.pt",
    }
    assert table(tmp_path, "epoch,train/box_loss\n1,2.5\n", "other.csv").config == {}
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\npath: !!python/object/apply:pathlib.PosixPath [data]\n")
    assert table(tmp_path, "step,loss\n1,2.5\n", "metrics.csv").config == {
        "lr": 0.1,
        "path": ["data"],
        "lr0": 0.01,
        "model": "yolo11n.pt",
    }


@pytest.mark.parametrize("name", ["curve.csv", "curve.jsonl", "curve.json"])
def test_a_packed_table_is_that_table(tmp_path: Path, name: str) -> None:
    lines = [json.dumps(row) for row in ROWS]
    text = {
        ".csv": "step,loss\n0,2.5\n1,0.30000000000000004\n2,inf\n",
        ".jsonl": "\n".join(lines),
        ".json": json.dumps(ROWS),
    }
    packed = gzip.compress(text[Path(name).suffix].encode())
    (tmp_path / f"{name}.gz").write_bytes(packed)
    [run] = read(tmp_path)
    assert (run.name, run.left_out, points(run, "loss")) == ("curve", [], [(0, 2.5), (1, 0.1 + 0.2), (2, math.inf)])
    for size in range(len(packed)):
        (tmp_path / f"{name}.gz").write_bytes(packed[:size])
        for cut in read(tmp_path):
            assert points(cut, "loss") == points(run, "loss")[: len(cut.series["loss"])]
            assert any("cut or damaged" in said for said in cut.left_out)


@pytest.mark.parametrize("text", ["text,label\na,1\n", "step\n1\n", "", "\n\n", "name,rank\n1,2\n"])
def test_table_of_something_else_is_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "data.csv").write_text(text)
    assert read(tmp_path) == []


@settings(deadline=None)
@given(st.integers(0, len(METRICS)))
def test_file_cut_at_any_byte_has_no_wrong_value(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    file = tmp_path_factory.mktemp("cut") / "metrics.csv"
    file.write_bytes(METRICS[:size])
    [whole] = read(FIXTURES / "lightning-2.6/lightning_logs")
    for run in read(file):
        for name, samples in run.series.items():
            assert samples.value.tobytes() == whole.series[name].value[: len(samples)].tobytes()
            assert samples.step == whole.series[name].step[: len(samples)]


@settings(deadline=None)
@given(st.integers(0, len(METRICS) - 1), st.integers(0, 255))
def test_changed_byte_is_no_crash(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int) -> None:
    file = tmp_path_factory.mktemp("flip") / "metrics.csv"
    data = bytearray(METRICS)
    data[at] = byte
    file.write_bytes(data)
    assert len(read(file)) <= 1
