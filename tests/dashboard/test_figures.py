"""Figures are pure: what goes in is what is drawn."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from perfagent.wire import CATALOGUE, PHASES, RankMatrix, Series
from perfagent_dashboard.figures import CHARTS, HIDDEN, patterns, rank_figure, series_figure, step_figure
from perfagent_dashboard.figures.series import BAND, HIGH, LOW, MEAN, NONFINITE, POINTS
from perfagent_dashboard.theme import DARK, LIGHT, PHASE_COLORS, Theme
from perfagent_dashboard.words import ENGLISH, STATE_SHAPES
from perfagent_server.rules.catalogue import all_rules

nan = math.nan


def series(**changes: object) -> Series:
    columns: dict[str, object] = {
        "step": [1, 2, 3],
        "min": [1.0, nan, 3.0],
        "max": [2.0, nan, 1e6],
        "mean": [1.5, nan, 4.0],
        "count": [4, 4, 4],
        "nonfinite": [0, 4, 1],
    }
    return Series(name="loss", rank="all", unit="", exact=False, **{**columns, **changes})  # type: ignore[arg-type]


def test_spike_of_one_bucket_is_in_the_outline_of_the_band() -> None:
    figure = series_figure(series(), LIGHT)
    assert max(value for value in figure.data[HIGH].y if value is not None) == 1e6
    assert figure.data[HIGH].line.width > 0.5


def test_bucket_without_finite_values_is_a_gap_and_never_zero() -> None:
    figure = series_figure(series(), LIGHT)
    assert [figure.data[trace].y[1] for trace in (LOW, HIGH, MEAN)] == [None, None, None]


def test_band_is_closed_at_every_gap_and_left_out_where_min_is_max() -> None:
    changes = {"step": [1, 2, 3, 4, 5, 6], "count": [4] * 6, "nonfinite": [0] * 6, "mean": [1.0] * 6}
    low, high = [1.0, 2.0, nan, 4.0, 5.0, nan], [3.0, 3.0, nan, 4.0, 6.0, nan]
    band = series_figure(series(**changes, min=low, max=high), LIGHT).data[BAND]
    assert band.fill == "toself"
    assert list(band.x) == [1, 2, 2, 1, None, 4, 5, 5, 4, None]
    assert list(band.y) == [1.0, 2.0, 3.0, 3.0, None, 4.0, 5.0, 6.0, 4.0, None]
    exact = series_figure(series(**changes, min=low, max=low), LIGHT)
    assert list(exact.data[BAND].x) == []


def test_a_point_between_gaps_is_a_dot_with_its_range() -> None:
    figure = series_figure(series(), LIGHT)
    assert list(figure.data[POINTS].x) == [1, 3]
    assert list(figure.data[POINTS].y) == [1.5, 4.0]
    assert list(figure.data[POINTS].error_y.array) == [0.5, 1e6 - 4]
    assert list(figure.data[POINTS].error_y.arrayminus) == [0.5, 1.0]


def test_every_bucket_with_nan_or_inf_is_marked() -> None:
    assert list(series_figure(series(), DARK).data[NONFINITE].x) == [2, 3]


def test_stack_has_a_place_for_every_phase_and_draws_those_that_are_known() -> None:
    figure = step_figure([1, 2], {"data": [0.1, 0.2], "forward": [0.3, 0.3]}, LIGHT)
    assert [trace.name for trace in figure.data] == list(PHASES)
    assert {trace.name for trace in figure.data if len(trace.x)} == {"data", "forward"}


def test_straggler_is_above_one_and_the_median_is_one() -> None:
    matrix = RankMatrix(
        name="step_time_s", unit="s", ranks=[0, 1, 2], step=[0, 10], mean=[[1.0, 1.0], [1.0, nan], [1.5, 2.0]]
    )
    rows = rank_figure(matrix, LIGHT).data[0].z
    assert list(rows[0]) == pytest.approx([1.0, 1 / 1.5])
    assert rows[1][1] is None
    assert rows[2][0] == 1.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_patterns_are_small(theme: Theme) -> None:
    assert len(json.dumps(patterns(theme))) < 8_000


def test_charts_name_known_metrics_once() -> None:
    names = [chart.name for chart in CHARTS]
    assert len(names) == len(set(names))
    assert set(names) | set(HIDDEN) == set(CATALOGUE)


def test_every_chart_that_a_rule_names_is_one_of_the_page() -> None:
    assert {name for rule in all_rules() for name in rule.charts} <= {chart.name for chart in CHARTS}


def test_every_state_has_a_shape_and_a_word_of_its_own() -> None:
    from perfagent.wire import STATES

    assert set(STATE_SHAPES) == set(STATES)
    assert {f"state_{state}" for state in STATES} <= set(ENGLISH)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_what_they_lie_on(theme: Theme) -> None:
    for text in (theme.text, theme.muted, theme.accent, theme.ok, theme.warning, theme.critical):
        assert contrast(text, theme.card) >= 4.5, text
    for tone in ("ok", "warning", "critical", "info"):
        assert contrast(getattr(theme, tone), getattr(theme, f"{tone}_soft")) >= 4.5, tone
    for color in theme.series:
        assert contrast(color, theme.card) >= 3, color


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_no_two_phases_share_a_color(theme: Theme) -> None:
    used = [theme.series[index] for index in PHASE_COLORS[theme.name].values()]
    assert len(used) == len(set(used)) == len(PHASES) - 1
    assert all(a != b for a, b in itertools.pairwise(used))


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two #rrggbb colours."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
