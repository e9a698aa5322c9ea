"""Which versions scripts/versions measures, and what docs/evidence/compatibility.md says of the results."""

from __future__ import annotations

from typing import Any

from versions import section
from versions.catalogue import TORCHES, numbers, pinned, trainings

from perfagent.patching import TESTED


def result(torch: str, python: str = "3.11", **more: Any) -> dict[str, Any]:
    unit = {"passed": 12, "failed": {}, "skipped": 3}
    trained = {"passed": len(trainings(torch)), "failed": {}, "skipped": 0}
    return {
        "torch": torch,
        "python": python,
        "day": "2026-11-29",
        "unit": unit,
        "trainings": trained,
        "demo": "",
    } | more


def test_versions_go_from_the_oldest_supported_to_the_pinned():
    assert numbers(TORCHES[0])[:2] == TESTED[0]
    assert TORCHES[-1] == pinned()
    assert TESTED[0] < numbers(pinned())[:2] < TESTED[1]


def test_a_result_takes_the_place_of_that_of_the_same_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(section, "KEPT", tmp_path / "versions.json")
    for one in (result("2.10.0"), result("2.4.1"), result("2.10.0", "3.14"), result("2.10.0", demo="no verdict")):
        section.keep(one)
    assert [(one["torch"], one["python"], one["demo"]) for one in section.kept()] == [
        ("2.4.1", "3.11", ""),
        ("2.10.0", "3.11", "no verdict"),
        ("2.10.0", "3.14", ""),
    ]


def test_a_row_says_how_much_passed_and_what_fails_is_named():
    unit = {"passed": 11, "failed": {"tests.agent.test_device::test_a_value[0.5]": "AssertionError"}, "skipped": 0}
    text = section.written([result("2.4.1"), result("2.13.0", unit=unit)])
    number = len(trainings("2.4.1"))
    assert f"| 2.4.1 | 3.11 | 12 of 12, 3 skipped | {number} of {number} | right | 2026-11-29 |" in text
    assert "| 2.13.0 | 3.11 | 11 of 12 |" in text
    assert "- torch 2.13.0, Python 3.11: `test_device::test_a_value[0.5]` fails." in text


def test_a_result_with_a_training_that_did_not_run_is_wrong():
    assert section.is_right(result("2.6.0"))
    assert not section.is_right(result("2.6.0", trainings={"passed": 1, "failed": {}, "skipped": 27}))
