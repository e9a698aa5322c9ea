"""The numbers that README.md and the evidence pages begin with are those of the results."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from documents import ROOT
from sick.batches import all_programs
from sick.page import UNSEEN, first_tries
from sick.results import read

EVIDENCE = ROOT / "docs" / "evidence"
RESULTS = ROOT / "benchmarks" / "results"
README, INDEX, COMPARISON = "README.md", "docs/evidence/index.md", "docs/evidence/comparison.md"
BENCHMARKS, DETECTION, FAULTS = (f"docs/evidence/{name}.md" for name in ("benchmarks", "detection", "faults"))


@functools.cache
def text(name: str) -> str:
    """A document without links and line breaks."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / name).read_text("utf-8"))
    return " ".join(re.sub(r"[*`]", "", shown).split())


@functools.cache
def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def cell(section: str, row: str, column: str) -> float:
    """A figure of a generated table of benchmarks.md."""
    part = (ROOT / BENCHMARKS).read_text("utf-8").partition(f"<!-- {section}:begin -->")[2]
    lines = [[one.strip(" *") for one in line.split("|")] for line in part.splitlines() if line.startswith("|")]
    found = next(line for line in lines if line[1] == row)
    return float(found[lines[0].index(column)].replace(",", ""))


def tries() -> dict[str, str]:
    """First tries on sick and healthy programs: of all, and of those that were written without sight of the rules."""
    kept = read()
    known = [program for program in all_programs() if program.key in kept]
    unseen = [program for program in known if program.batch.startswith(UNSEEN)]
    return dict(zip(("sick", "false"), first_tries(unseen, kept), strict=True)) | dict(
        zip(("all sick", "all false"), first_tries(known, kept), strict=True)
    )


def test_first_tries_on_unseen_programs_are_those_of_the_results() -> None:
    found = tries()
    for name in (README, INDEX, DETECTION):
        assert f"{found['sick']} sick programs" in text(name) or f"{found['sick']} (" in text(name), name
        assert f"{found['false']} healthy programs" in text(name) or f"{found['false']} (" in text(name), name
    assert found["all sick"] in text(DETECTION)
    assert found["all false"] in text(DETECTION)
    right, of = map(int, found["sick"].split(" of "))
    assert f"({100 * right / of:.0f} %)" in text(INDEX)


def test_healthy_steps_and_put_in_faults_are_those_measured() -> None:
    measured = result("detection")
    healthy = [run for run in measured["healthy"] if run["kind"] != "scaled"]
    steps = f"{sum(run['steps'] for run in healthy):,}"
    assert [alert for run in healthy for alert in run["alerts"] if alert["severity"] != "info"] == []
    for name in (README, INDEX):
        assert re.search(rf"none in {steps} healthy steps", text(name), re.IGNORECASE), name
    assert f"0 in {steps} steps" in text(DETECTION)
    found, total, early = (sum(one[key] for one in measured["faults"]) for key in ("found", "total", "early"))
    assert f"{found:,} of {total:,}, with {early} false alerts" in text(DETECTION)


def test_faults_of_the_demo_are_those_of_the_results() -> None:
    [named] = [line for line in result("faults")["demo"]["lines"] if line["total"] > 1]
    assert named["survived"] == named["total"]
    assert f"all {named['total']} faults of the demo" in text(README)
    assert f"{named['survived']} of {named['total']}" in text(DETECTION)


def test_faults_survived_are_those_of_the_table() -> None:
    found = re.search(r"(\d+)/(\d+) rows survived", text(FAULTS))
    assert found
    for name in (README, INDEX, FAULTS):
        assert f"{found[1]} of {found[2]}" in text(name), name
    worst = next(line for line in result("faults")["agent-kill"]["lines"] if "worst" in line["figures"])
    assert re.search(r"worst (\d+ ms)", worst["figures"])[1] in text(FAULTS)  # type: ignore[index]


def test_libraries_and_gpu_checks_are_those_of_their_pages() -> None:
    right = re.search(r"\*\*(\d+)/(\d+) right", (EVIDENCE / "libraries.md").read_text("utf-8"))
    passed = re.search(r"(\d+) passed, (\d+) failed", (EVIDENCE / "gpu.md").read_text("utf-8"))
    assert right
    assert passed
    for name in (README, INDEX):
        assert f"{right[1]} of {right[2]} libraries" in text(name), name
        assert f"{passed[1]} of {int(passed[1]) + int(passed[2])} checks" in text(name), name


def test_versions_of_torch_are_those_that_were_tried() -> None:
    tried = sorted(tuple(map(int, one["torch"].split(".")[:2])) for one in result("versions"))
    (oldest, *_), (*_, newest) = tried, tried
    words = "{}.{} to {}.{}".format(*oldest, *newest)
    for name in (README, INDEX):
        assert re.search(f"torch {re.escape(words)}", text(name), re.IGNORECASE), name


@pytest.mark.parametrize(
    ("section", "row", "column", "shown"),
    [
        ("overhead", "perfagent attach + log", "total CPU %", [(README, ".1f"), (INDEX, ".1f"), (COMPARISON, ".1f")]),
        ("overhead", "perfagent log", "total CPU %", [(COMPARISON, ".1f")]),
        ("overhead", "wandb offline", "total CPU %", [(README, ".1f"), (COMPARISON, ".1f")]),
        ("overhead", "tensorboard", "total CPU %", [(README, ".1f"), (COMPARISON, ".1f")]),
        ("overhead", "trackio", "total CPU %", [(README, ".1f"), (COMPARISON, ".1f")]),
        ("overhead-deep", "perfagent attach + log", "total CPU %", [(BENCHMARKS, ".1f"), (INDEX, ".1f")]),
        ("gradients", "perfagent, every tenth step", "% of the step", [(BENCHMARKS, ".1f"), (COMPARISON, ".1f")]),
        ("gradients", "wandb.watch, every tenth step", "% of the step", [(BENCHMARKS, ".0f"), (COMPARISON, ".0f")]),
    ],
)
def test_costs_are_those_of_the_benchmark(section: str, row: str, column: str, shown: list[tuple[str, str]]) -> None:
    for name, form in shown:
        assert f"{cell(section, row, column):{form}} %" in text(name), name


@pytest.mark.parametrize("row", ["perfagent log", "trackio", "tensorboard", "wandb offline"])
def test_cost_of_a_log_call_is_that_of_the_benchmark(row: str) -> None:
    figure = cell("overhead", row, "log call, 10 scalars: CPU µs")
    words = f"{figure:.1f}" if figure < 10 else f"{figure:.0f}"
    assert f"{words} µs" in text(COMPARISON)


def test_questions_found_are_those_of_the_results() -> None:
    for group in ("plain", "drawn", "on pages"):
        found = result("questions")[group]
        assert f"{found['right_page_first']:,} of {found['questions']:,}" in text(INDEX), group


def test_chinese_readme_claims_the_same_numbers() -> None:
    chinese = ROOT / "README.zh-CN.md"
    if not chinese.exists():
        pytest.skip("there is none")
    rows = re.findall(r"^\| (?:It|False) .*", (ROOT / README).read_text("utf-8"), re.MULTILINE)
    numbers = set(re.findall(r"\d[\d,.]*\d|\d", re.sub(r"\]\([^)]*\)", "]", " ".join(rows))))
    there = re.sub(r"\]\([^)]*\)", "]", chinese.read_text("utf-8"))
    assert {number for number in numbers if number not in there} == set()
