"""What torch.compile makes of functions that we watch is what it makes of them without us."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from builders import job_environment
from preloaded import run

HERE = Path(__file__).parent
IN_GRAPHS = (
    "all_reduce", "all_reduce_of_an_operation", "all_reduce_imported_earlier", "all_gather_into_tensor", "reduce_scatter_tensor",
)  # fmt: skip
BREAKING = ("broadcast", "barrier", "all_reduce_begun")
BETWEEN = ("clip_grad_norm_", "get_total_norm", "zero_grad")
ATTACHED = ("first", "later")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compiled")
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    ended = run([str(HERE / "compiled_job.py"), str(folder)], folder, [job_environment(folder, PYTHONPATH=path)])
    assert ended[0].returncode == 0, ended[0].stderr
    return json.loads((folder / "told.json").read_text())


@pytest.mark.parametrize("attached", ATTACHED)
@pytest.mark.parametrize("name", [*IN_GRAPHS, *BREAKING, *BETWEEN])
def test_results_are_bit_equal_with_and_without(told, name, attached):
    assert told[name][attached]["losses"] == told[name]["never"]["losses"]
    assert not told[name][attached]["failures"]


@pytest.mark.parametrize("attached", ATTACHED)
@pytest.mark.parametrize("name", [*IN_GRAPHS, *BREAKING])
def test_collectives_leave_the_graphs_and_their_breaks_as_they_are(told, name, attached):
    without, seen = told[name]["never"], told[name][attached]
    assert seen["graphs"] == without["graphs"]
    again = name == "barrier"  # watched under its name, it is another function once, and its frame is looked at again
    assert seen["breaks"] == without["breaks"] + again
    assert bool(without["breaks"]) is (name in BREAKING), "else the test would show nothing"


@pytest.mark.parametrize("name", BETWEEN)
def test_what_comes_between_backward_and_step_is_one_graph(told, name):
    without = told[name]["never"]
    assert told[name]["first"]["graphs"] == without["graphs"]
    assert len(without["graphs"]) == 1
    later = told[name]["later"]  # compiled anew at most once: a function it has in it has become another
    assert later["graphs"] in (without["graphs"], without["graphs"] * 2)
    assert [told[name][word]["breaks"] for word in ATTACHED] == [0, 0]


@pytest.mark.parametrize("name", BREAKING)
def test_a_collective_at_a_break_is_timed(told, name):
    assert told[name]["first"]["waits"] >= 3


@pytest.mark.parametrize("attached", ATTACHED)
def test_collectives_can_be_pickled_while_they_are_watched(told, attached):
    assert told["all_reduce"][attached]["same"] == [True, True, True]


@pytest.mark.parametrize("attached", ATTACHED)
def test_warnings_of_collectives_come_from_where_they_come_without_us(told, attached):
    assert told["all_reduce"][attached]["places"] == ["c10d_logger.py"]
