"""Figures are pure: what goes in is what is drawn."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from color_difference import ciede2000, hue, smallest_difference

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


def test_no_two_phases_share_a_color() -> None:
    assert len(set(PHASE_COLORS.values())) == len(PHASE_COLORS) == len(PHASES) - 1


OKABE_ITO = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")


def test_the_distance_of_colors_is_that_of_the_published_pairs() -> None:
    """The first and some others of the 34 of Sharma, Wu and Dalal."""
    pairs = [
        ([50, 2.6772, -79.7751], [50, 0, -82.7485], 2.0425),
        ([50, 0, 0], [50, -1, 2], 2.3669),
        ([50, 2.5, 0], [73, 25, -18], 27.1492),
        ([60.2574, -34.0099, 36.2677], [60.4626, -34.1751, 39.4387], 1.2644),
        ([2.0776, 0.0795, -1.135], [0.9033, -0.0636, -0.5514], 0.9082),
    ]
    one, other, known = (np.array(column) for column in zip(*pairs, strict=True))
    assert ciede2000(one, other) == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_are_told_apart_by_everybody_better_than_okabe_itos(theme: Theme) -> None:
    assert smallest_difference(theme.series) > 11.9 > smallest_difference(OKABE_ITO) + 0.9


def test_the_same_thing_has_the_same_hue_in_both_themes() -> None:
    for light, dark in zip(LIGHT.series, DARK.series, strict=True):
        assert abs((hue(light) - hue(dark) + 180) % 360 - 180) < 30, (light, dark)


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two #rrggbb colours."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
