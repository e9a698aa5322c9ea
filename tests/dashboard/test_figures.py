"""Patterns of charts, their names and colors."""

from __future__ import annotations

import json

import pytest

from perfagent.wire import CATALOGUE, PHASES, STATES
from perfagent_dashboard.figures import CHARTS, HIDDEN, patterns
from perfagent_dashboard.theme import DARK, LIGHT, PHASE_COLORS, Theme
from perfagent_dashboard.words import ENGLISH, STATE_SHAPES
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
    assert {f"state_{state}" for state in STATES} <= set(ENGLISH)


@BOTH
def test_text_and_lines_stand_out_from_what_they_lie_on(theme: Theme) -> None:
    for text in (theme.text, theme.muted, theme.accent, theme.ok, theme.warning, theme.critical):
        assert contrast(text, theme.card) >= 4.5, text
    for tone in ("ok", "warning", "critical", "info"):
        assert contrast(getattr(theme, tone), getattr(theme, f"{tone}_soft")) >= 4.5, tone
    for color in theme.series:
        assert contrast(color, theme.card) >= 3, color
    assert len(set(PHASE_COLORS.values())) == len(PHASE_COLORS) == len(PHASES) - 1


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two #rrggbb colors."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
