"""Names of charts, and shapes of states."""

from __future__ import annotations

from perfagent.wire import CATALOGUE, STATES
from perfagent_dashboard.figures.charts import CHARTS, HIDDEN
from perfagent_dashboard.words import STATE_SHAPES, keys
from perfagent_server.rules.catalogue import all_rules


def test_charts_name_known_metrics_once_and_rules_name_charts() -> None:
    names = [chart.name for chart in CHARTS]
    assert len(names) == len(set(names))
    assert set(names) | set(HIDDEN) == set(CATALOGUE)
    assert {name for rule in all_rules() for name in rule.charts} <= set(names)


def test_every_state_has_a_shape_and_a_word_of_its_own() -> None:
    assert set(STATE_SHAPES) == set(STATES)
    assert {f"state_{state}" for state in STATES} <= set(keys("en"))
