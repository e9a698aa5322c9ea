"""CSV files as runs: columns, times, gaps, and what is no such file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from perfagent.errors import ConfigError, ResourceError
from perfagent_server.backtest.curve_file import EPOCH, read_curve_file
from perfagent_server.backtest.moment import Moment


def read(folder: Path, text: str) -> list[Moment]:
    path = folder / "curve.csv"
    path.write_text(text)
    return list(read_curve_file(path))


def values(moments: list[Moment]) -> list[dict[str, float]]:
    return [moment.values for moment in moments]


def test_an_empty_cell_is_absent_and_nan_and_inf_are_values(tmp_path: Path) -> None:
    found = values(read(tmp_path, "step,loss,grad_norm,loss_scale\n1,3.5,,1024\n2,nan,inf,\n3,-Infinity,0.5,512\n"))
    assert found[0] == {"loss": 3.5, "amp/scale": 1024.0}
    assert math.isnan(found[1]["loss"]) and found[1]["grad/norm"] == math.inf and "amp/scale" not in found[1]
    assert found[2] == {"loss": -math.inf, "grad/norm": 0.5, "amp/scale": 512.0}


def test_catalogue_names_families_and_losses_are_columns(tmp_path: Path) -> None:
    head = "step,phase/data_s,grad_norm/encoder.0.weight,val_loss,g_loss,process/rss_bytes"
    [moment] = read(tmp_path, f"{head}\n7,0.1,2,3,4,5\n")
    assert list(moment.values) == head.split(",")[1:]


TIMER = "step,loss,train_time_ms\n"
GIVEN = "step,loss,step_time_s"


@pytest.mark.parametrize(
    ("text", "step_times", "times"),
    [
        # step 4 is missing, and the run did not stand still
        (TIMER + "1,9,74701\n2,8,75001\n3,7,75301\n5,6,75901\n", [None, 0.3, 0.3, 0.3], [0.0, 0.3, 0.6, 0.9]),
        (  # the timer is set back
            TIMER + "9,9,5000\n10,8,5200\n11,7,100\n12,6,300\n13,5,\n14,4,700\n",
            [None, 0.2, None, 0.2, None, 0.2], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
        ),
        # what is given counts before the timer
        (f"{GIVEN},train_time_ms\n1,9,2,0\n2,8,3,100\n3,7,,200\n", [2.0, 3.0, 0.1], [0.0, 3.0, 3.1]),
        # rows of every tenth step are ten steps apart, and a gap is no pause
        (f"{GIVEN}\n10,9,2\n20,8,2\n30,7,2\n500,6,2\n510,5,2\n", [2.0] * 5, [0.0, 20.0, 40.0, 60.0, 80.0]),
        # a row without any time takes a second, and no step time is made up
        ("step,loss\n0,9\n10,8\n20,7\n", [None] * 3, [0.0, 1.0, 2.0]),
    ],
    ids=["timer", "set back", "given", "gaps", "no time"],
)  # fmt: skip
def test_step_times_and_clock_are_those_of_the_file(
    tmp_path: Path, text: str, step_times: list[float | None], times: list[float]
) -> None:
    moments = read(tmp_path, text)
    assert [moment.values.get("step_time_s") for moment in moments] == step_times
    assert [round(moment.time - EPOCH, 6) for moment in moments] == times


def test_run_that_begins_late_or_goes_back_is_a_restart(tmp_path: Path) -> None:
    moments = read(tmp_path, "step,loss\n100,3\n101,3\n102,3\n101,3\n102,3\n")
    assert [moment.attempt for moment in moments] == [1, 1, 1, 2, 2]
    starts = [event.data["start_step"] for moment in moments for event in moment.events]
    assert starts == [100, 101]


def test_an_evaluation_in_a_row_of_its_own_is_no_restart(tmp_path: Path) -> None:
    moments = read(tmp_path, "step,loss,val_loss\n1,3,\n1,,4\n2,3,\n")
    assert [moment.attempt for moment in moments] == [1, 1, 1]
    assert values(moments)[1] == {"val_loss": 4.0}


def test_an_export_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = ["name,rank,step,time,value", "loss,0,1,100.0,2.5", "loss,0,2,101.0,NaN", "loss,1,1,100.5,2.0"]
    moments = read(tmp_path, "\n".join([*rows, "lr,0,1,100.0,0.1", "lr,0,2,101.0,0.2"]) + "\n")
    assert [(one.rank, one.step, one.time) for one in moments] == [(0, 1, 100.0), (1, 1, 100.5), (0, 2, 101.0)]
    assert moments[0].values == {"loss": 2.5, "lr": 0.1}
    assert math.isnan(moments[2].values["loss"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column `step`; it has none"),
        (
            "iteration,loss\n1,2\n",
            "no column `step`; it has iteration, loss, and allowed are step, loss, lr, grad_norm",
        ),
        ("step\n1\n", "no column but `step`"),
        ("step,loss\n", "no row below its head"),
        ("step,loss,loss\n1,2,3\n", "two columns 'loss'"),
        (
            "step,loss,grad_nrm\n1,2,3\n",
            "a column 'grad_nrm' that no rule reads (did you mean grad_norm?); allowed are",
        ),
        ("step,loss\n1,2\n2,high\n", "line 3: loss is 'high', not a number; leave a cell empty"),
        ("step,loss\n1,2\n,3\n", "line 3: there is no step"),
        ("step,loss\n1.5,2\n", "line 2: step is 1.5, not a whole number"),
        ("step,loss\n-1,2\n", "line 2: step is -1, not a whole number"),
        ("step,loss\nnan,2\n", "line 2: step is nan, not a whole number"),
        ("step,loss\n1,2,3\n", "line 2: 3 cells for 2 columns"),
        ("name,rank,step,time,value\nloss,0,1,2\n", "line 2: 4 cells for 5 columns"),
        ("name,rank,step,time,value\nloss,0,one,2,3\n", "line 2: invalid literal"),
    ],
)
def test_what_is_no_such_file_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert said in str(raised.value) and "curve.csv" in str(raised.value)


def test_file_without_text_and_unreadable_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_bytes(b"step,loss\n\xff\xfe\n")
    with pytest.raises(ConfigError, match="is no CSV file"):
        list(read_curve_file(path))
    with pytest.raises(ResourceError, match="cannot be read"):
        list(read_curve_file(tmp_path / "none.csv"))
