"""SARIF as code scanning takes it, whatever was found where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from code_scanning import assert_shown

from perfagent_server.ci_reports import Result, sarif
from perfagent_server.rules.catalogue import all_rules


def shown(*results: Result, **own_rules: str) -> list[dict[str, Any]]:
    return assert_shown(json.loads(sarif("perfagent", results, own_rules)))


def test_every_rule_has_what_code_scanning_requires() -> None:
    rules = [rule.id for rule in all_rules()]
    found = shown(*(Result(rule, "warning", "text", "a.csv") for rule in rules * 2))
    assert [one["ruleId"] for one in found] == rules * 2


def test_a_rule_of_a_script_and_one_of_the_tool_have_it_too() -> None:
    shown(
        Result("of_a_script", "note", "", "a.csv"), Result("slower", "error", "text", "a.csv"), slower="It is slower."
    )


@pytest.mark.parametrize(
    ("place", "uri"),
    [
        ("a/größe #1 50%.csv", "a/gr%C3%B6%C3%9Fe%20%231%2050%25.csv"), ("a run: 1?", "a%20run%3A%201%3F"), ("", "."),
        (str(Path.cwd() / "a.csv"), "a.csv"), ("/a b", "file:///a%20b"), ("\udcff", "%3F"),
    ],
)  # fmt: skip
def test_a_place_is_a_uri(place: str, uri: str) -> None:
    [result] = shown(Result("nonfinite_loss", "error", "text", place))
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri


def test_the_same_finding_is_known_again_and_others_are_not_it() -> None:
    def identity(rule: str, message: str, place: str, run: str) -> str:
        [result] = shown(Result(rule, "error", message, place, run))
        return str(result["partialFingerprints"]["primaryLocationLineHash"])

    first = identity("nonfinite_loss", "in step 30", "a.csv", "a")
    assert identity("nonfinite_loss", "in step 60", "a.csv", "a") == first
    others = [("hang", "a.csv", "a"), ("nonfinite_loss", "b.csv", "a"), ("nonfinite_loss", "a.csv", "b")]
    assert len({first, *(identity(rule, "text", place, run) for rule, place, run in others)}) == 4
