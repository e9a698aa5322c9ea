"""Patterns of charts, their names and colors."""

from __future__ import annotations

import json

import pytest

from perfagent.wire import CATALOGUE, PHASES, STATES
from perfagent_dashboard.figures import CHARTS, HIDDEN, patterns
from perfagent_dashboard.theme import DARK, LIGHT, Theme
from perfagent_dashboard.words import STATE_SHAPES, keys
from perfagent_server.rules.catalogue import all_rules

BOTH = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])


@BOTH
def test_patterns_are_small_and_have_a_place_for_every_phase(theme: Theme) -> None:
    assert len(json.dumps(patterns(theme))) < 8_000
    assert [trace["name"] for trace in patterns(theme)["step"]["data"]] == list(PHASES)


def test_charts_name_known_metrics_once_and_rules_name_charts() -> None:
    names = [chart.name for chart in CHARTS]
    assert len(names) == len(set(names))
    assert set(names) | set(HIDDEN) == set(CATALOGUE)
    assert {name for rule in all_rules() for name in rule.charts} <= set(names)


def test_every_state_has_a_shape_and_a_word_of_its_own() -> None:
    assert set(STATE_SHAPES) == set(STATES)
    assert {f"state_{state}" for state in STATES} <= set(keys("en"))
