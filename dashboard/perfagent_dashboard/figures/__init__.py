"""How charts look: plotly figures without data, which the page fills. No request, no clock, no Dash."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from perfagent_dashboard.figures.charts import CHARTS, HIDDEN, Chart, chart_table
from perfagent_dashboard.figures.ranks import rank_figure
from perfagent_dashboard.figures.series import series_figure
from perfagent_dashboard.figures.step import step_figure
from perfagent_dashboard.theme import Theme

__all__ = ["CHARTS", "HIDDEN", "Chart", "chart_table", "patterns"]


@cache
def patterns(theme: Theme) -> dict[str, Any]:
    """The empty figures that the page fills with data, ready for JSON. Cached: plotly takes 70 ms per theme."""
    figures = {
        "series": series_figure(theme),
        "step": step_figure(theme),
        "ranks": rank_figure(theme),
    }
    return {name: json.loads(figure.to_json()) for name, figure in figures.items()}
