"""The comparison of scripts/libraries finds what is wrong; the libraries themselves are no dependencies."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from agent_recorded import Recorded, recorded
from libraries.catalogue import LIBRARIES
from libraries.comparing import COLUMNS, compared
from libraries.page import PAGE, document
from libraries.running import TRAININGS, Ran, both

STEPS = range(1, 25)
TRUTH = {
    "steps": [{"loss": 1 / step, "lr": 0.1, "samples": 5} for step in STEPS],
    "evaluations": [8, 16, 24],
    "digest": "of the weights",
}
RAN = Ran(TRUTH, "epoch 1")
SERIES = {
    "loss": {step: 1 / step for step in STEPS},
    "lr": dict.fromkeys(STEPS, 0.1),
    "step_time_s": dict.fromkeys(STEPS, 0.5),
    "samples_per_s": dict.fromkeys(STEPS, 10.0),
    "phase/eval_s": {9: 0.1, 17: 0.1, 24: 0.1},
}
RECORDED = Recorded("run", 0, 1, SERIES, [{"state": "finished"}])


def wrong(*, alone: Ran = RAN, watched: Ran = RAN, sources: tuple[Recorded, ...] = (RECORDED,)) -> set[str]:
    return {column for column, words in compared(alone, watched, [*sources]).items() if words}


def with_series(name: str, values: dict[int, float]) -> tuple[Recorded, ...]:
    return (dataclasses.replace(RECORDED, series=SERIES | {name: values}),)


def without(name: str, step: int) -> dict[int, float]:
    return {at: value for at, value in SERIES[name].items() if at != step}


def test_what_is_as_the_script_knows_it_is_right() -> None:
    assert compared(RAN, RAN, [RECORDED]) == dict.fromkeys(COLUMNS, "")


@pytest.mark.real
@pytest.mark.long
def test_a_plain_training_is_right_in_every_column(tmp_path: Path) -> None:
    alone, watched = both(Path(sys.executable), TRAININGS / "plain.py", tmp_path)
    assert compared(alone, watched, recorded(tmp_path / "watched" / "record")) == dict.fromkeys(COLUMNS, "")


@pytest.mark.parametrize(("name", "column"), [("loss", "loss"), ("lr", "rate"), ("samples_per_s", "samples")])
def test_a_value_that_is_wrong_or_missing_is_found(name: str, column: str) -> None:
    assert wrong(sources=with_series(name, without(name, 7))) == {column}
    assert wrong(sources=with_series(name, SERIES[name] | {7: SERIES[name][7] * 1.00001})) == {column}


def test_other_differences_are_found() -> None:
    gap = dataclasses.replace(RECORDED, series=SERIES | {name: without(name, 7) for name in ("step_time_s", "loss")})
    assert "steps" in wrong(sources=(gap,))
    fewer = Ran(TRUTH | {"steps": TRUTH["steps"][:-1]}, "")
    assert "steps" in wrong(alone=fewer, watched=fewer)

    assert wrong(sources=with_series("phase/eval_s", without("phase/eval_s", 17))) == {"evaluations"}

    assert wrong(alone=Ran(TRUTH | {"digest": "another"}, "")) == {"bit-equal"}
    assert wrong(watched=Ran(TRUTH, "perfagent: hello")) == {"console"}
    assert wrong(watched=Ran(TRUTH, "perfagent: watch it at http://127.0.0.1:8420/run/r (run r)")) == set()
    assert wrong(sources=(dataclasses.replace(RECORDED, states=[]),)) == {"end"}
    assert {"end", "steps", "loss"} <= wrong(sources=())


def test_the_page_is_as_it_is_written_with_every_library() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert document([], page, "") == page, "scripts/libraries --write writes it anew"
    assert [library.name for library in LIBRARIES if f"| {library.name} |" not in page] == []

    scripts = sorted(path.name for path in TRAININGS.glob("with_*.py"))
    assert sorted(f"with_{library.name}.py" for library in LIBRARIES) == scripts
