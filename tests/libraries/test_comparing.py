"""The comparison of scripts/libraries finds what is wrong; tried on a plain loop, since the libraries are no
dependencies."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from agent.frameworks.recordings import Recorded, recorded
from libraries.catalogue import LIBRARIES
from libraries.comparing import COLUMNS, compared
from libraries.page import PAGE, Result, document
from libraries.running import TRAININGS, Ran, both


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran, list[Recorded]]:
    folder = tmp_path_factory.mktemp("plain")
    alone, watched = both(Path(sys.executable), TRAININGS / "plain.py", folder)
    return alone, watched, recorded(folder / "watched" / "record")


def wrong(alone: Ran, watched: Ran, sources: list[Recorded]) -> set[str]:
    return {column for column, words in compared(alone, watched, sources).items() if words}


def lacking(sources: list[Recorded], name: str, *steps: int) -> list[Recorded]:
    """What was recorded, without some steps of a series."""
    (source,) = sources
    kept = {step: value for step, value in source.series[name].items() if step not in steps}
    return [dataclasses.replace(source, series=source.series | {name: kept})]


@pytest.mark.long
def test_a_plain_training_is_right_in_every_column(trained: Any) -> None:
    assert compared(*trained) == dict.fromkeys(COLUMNS, "")


@pytest.mark.parametrize(("name", "column"), [("loss", "loss"), ("lr", "rate"), ("samples_per_s", "samples")])
def test_a_value_that_is_wrong_or_missing_is_found(trained: Any, name: str, column: str) -> None:
    alone, watched, sources = trained
    assert wrong(alone, watched, lacking(sources, name, 7)) == {column}
    series = sources[0].series
    other = series[name] | {7: series[name][7] * 1.00001}
    assert wrong(alone, watched, [dataclasses.replace(sources[0], series=series | {name: other})]) == {column}


def test_a_gap_in_the_steps_and_a_step_too_many_are_found(trained: Any) -> None:
    alone, watched, sources = trained
    gap = lacking(lacking(sources, "step_time_s", 7), "loss", 7)
    assert "steps" in wrong(alone, watched, gap)
    fewer = Ran(watched.truth | {"steps": watched.truth["steps"][:-1]}, "")
    assert "steps" in wrong(fewer, fewer, sources)


@pytest.mark.long
def test_an_evaluation_that_is_not_told_is_found(trained: Any) -> None:
    alone, watched, sources = trained
    assert watched.truth["evaluations"] == [8, 16, 24]
    assert wrong(alone, watched, lacking(sources, "phase/eval_s", 17)) == {"evaluations"}


def test_other_weights_an_own_line_and_a_run_without_an_end_are_found(trained: Any) -> None:
    alone, watched, sources = trained
    assert wrong(Ran(alone.truth | {"digest": "another"}, ""), watched, sources) == {"bit-equal"}
    assert wrong(alone, Ran(watched.truth, "perfagent: hello"), sources) == {"console"}
    assert wrong(alone, watched, [dataclasses.replace(sources[0], states=[])]) == {"end"}
    assert {"end", "steps", "loss"} <= wrong(alone, watched, [])


def test_the_page_keeps_the_lines_of_libraries_that_were_not_tried_again() -> None:
    first, second = LIBRARIES[:2]
    page = document(
        [Result(first, "1.0", {"loss": ""}), Result(second, trouble="not installed: a | b")], "", "2026-01-01"
    )
    assert "**1/2 right.**" in page
    again = document([Result(second, "2.0", {"loss": ""}, 3)], page, "2026-01-02")
    assert "**2/2 right.**" in again
    assert f"| {first.name} | 1.0 |" in again
    assert "2026-01-01" in again


def test_the_page_is_as_it_is_written_and_names_every_library() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert document([], page, "") == page, "scripts/libraries --write writes it anew"
    assert [library.name for library in LIBRARIES if f"| {library.name} |" not in page] == []


def test_every_library_has_a_script_and_every_script_is_in_the_catalogue() -> None:
    assert sorted(f"with_{library.name}.py" for library in LIBRARIES) == sorted(
        path.name for path in TRAININGS.glob("with_*.py")
    )
