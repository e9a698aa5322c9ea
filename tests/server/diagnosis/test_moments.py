"""Runs of files as moments: times, gaps, restarts, ends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from perfagent_client.history import OldRun, find_runs
from perfagent_server.backtest.moment import Moment
from perfagent_server.diagnosis.moments import EPOCH, moments
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan

PLAN = Plan(all_rules())


def read(folder: Path, text: str) -> list[Moment]:
    path = folder / "curve.csv"
    path.write_text(text)
    return [moment for source in find_runs([path]) for run in source.read() for moment in moments(run, PLAN)]


def values(found: list[Moment]) -> list[dict[str, float]]:
    return [moment.values for moment in found]


def test_an_empty_cell_is_absent_and_nan_and_inf_are_values(tmp_path: Path) -> None:
    found = values(read(tmp_path, "step,loss,grad_norm,loss_scale\n1,3.5,,1024\n2,nan,inf,\n3,-Infinity,0.5,512\n"))
    assert found[0] == {"loss": 3.5, "amp/scale": 1024.0}
    assert math.isnan(found[1]["loss"]) and found[1]["grad/norm"] == math.inf and "amp/scale" not in found[1]
    assert found[2] == {"loss": -math.inf, "grad/norm": 0.5, "amp/scale": 512.0}


def test_only_what_rules_read_is_judged(tmp_path: Path) -> None:
    head = "step,phase/data_s,grad_norm/encoder.0.weight,val_loss,g_loss,train/learning_rate,accuracy"
    [moment] = read(tmp_path, f"{head}\n7,0.1,2,3,4,5,6\n")
    assert set(moment.values) == {"phase/data_s", "grad_norm/encoder.0.weight", "val_loss", "g_loss", "lr"}


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
        # times of day put series in order, and a night between two rows is no pause of the training
        ("step,loss,timestamp\n0,9,1700000000\n10,8,1700040000\n20,7,1700040001\n", [None] * 3, [0.0, 1.0, 2.0]),
    ],
    ids=["timer", "set back", "given", "gaps", "no time", "times of day"],
)  # fmt: skip
def test_step_times_and_clock_are_those_of_the_file(
    tmp_path: Path, text: str, step_times: list[float | None], times: list[float]
) -> None:
    found = read(tmp_path, text)
    assert [moment.values.get("step_time_s") for moment in found] == step_times
    assert [round(moment.time - EPOCH, 6) for moment in found] == times


def starts(found: list[Moment]) -> list[int]:
    return [event.data["start_step"] for moment in found for event in moment.events if event.data["state"] == "running"]


def test_run_that_begins_late_or_goes_back_is_a_restart(tmp_path: Path) -> None:
    found = read(tmp_path, "step,loss\n100,3\n101,3\n102,3\n101,3\n102,3\n")
    assert [moment.attempt for moment in found] == [1, 1, 1, 2, 2]
    assert starts(found) == [100, 101]


def test_run_that_logs_every_tenth_step_begins_with_the_tenth(tmp_path: Path) -> None:
    assert starts(read(tmp_path, "step,loss\n10,3\n20,3\n30,3\n")) == [0]


def test_an_evaluation_in_a_row_of_its_own_is_no_restart(tmp_path: Path) -> None:
    found = read(tmp_path, "step,loss,val_loss\n1,3,\n1,,4\n2,3,\n")
    assert values(found) == [{"loss": 3.0, "val_loss": 4.0}, {"loss": 3.0}]


def test_a_step_that_is_written_twice_is_judged_twice(tmp_path: Path) -> None:
    assert [value["loss"] for value in values(read(tmp_path, "step,loss\n1,3\n1,4\n2,5\n"))] == [3.0, 4.0, 5.0]


def test_sparse_series_belong_to_the_attempt_that_had_begun(tmp_path: Path) -> None:
    run = OldRun("x:1", "x")
    for step in (*range(1, 11), *range(6, 16)):
        run.add("loss", step, 1.0)
    for step in (5, 10, 15):
        run.add("val_loss", step, 2.0)
    found = [(moment.attempt, moment.step) for moment in moments(run, PLAN) if "val_loss" in moment.values]
    assert found == [(1, 5), (2, 10), (2, 15)]


def test_an_export_of_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = ["name,rank,step,time,value", "loss,0,1,100.0,2.5", "loss,0,2,101.0,NaN", "loss,1,1,100.5,2.0"]
    found = read(tmp_path, "\n".join([*rows, "lr,0,1,100.0,0.1", "lr,0,2,101.0,0.2"]) + "\n")
    assert [(one.rank, one.step, one.time) for one in found] == [(0, 1, 100.0), (1, 1, 100.5), (0, 2, 101.0)]
    assert found[0].values == {"loss": 2.5, "lr": 0.1}
    assert math.isnan(found[2].values["loss"])
