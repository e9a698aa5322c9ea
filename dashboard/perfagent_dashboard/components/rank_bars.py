"""The own work of ranks as bars, the slowest first: what makes the others wait is the long one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from dash import html
from dash.development.base_component import Component

from perfagent.wire.quantities import duration
from perfagent_dashboard.components.numbers import number
from perfagent_dashboard.words import say

__all__ = ["own_work_of", "rank_bars"]

_MOST = 6


def own_work_of(findings: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Rank -> seconds of own work, as the first of these findings that compares ranks gives them; {} if none does."""
    for finding in findings:
        told = finding["evidence"].get("own_s_by_rank")
        if isinstance(told, Mapping):
            known = {str(rank): number(value) for rank, value in told.items()}
            return {int(rank): value for rank, value in known.items() if rank.isdigit() and value is not None}
    return {}


def rank_bars(own: Mapping[int, float], named: Sequence[int], typical_s: float | None) -> Component:
    """named: the ranks that the finding is about; typical_s: the work of a typical rank, where the finding says it."""
    longest, middle = max(own.values()), typical_s or median(own.values())
    ranks = sorted(own, key=lambda rank: (-own[rank], rank))
    rows = [_bar(f"{say('rank')} {rank}", own[rank], longest, middle, is_named=rank in named) for rank in ranks[:_MOST]]
    if len(ranks) > _MOST:
        rows.append(_bar(say("typical_rank"), middle, longest, middle, is_named=False))
    return html.Div([html.H3(say("own_work"), title=say("own_work_hint")), *rows], className="rank-bars")


def _bar(label: str, seconds: float, longest: float, middle: float, *, is_named: bool) -> Component:
    width = 100 * seconds / longest if longest > 0 else 0.0
    times = f" · {seconds / middle:.2f} ×" if middle > 0 else ""
    return html.Div(
        [
            html.Span(label),
            html.I(style={"width": f"{width:.1f}%"}),
            html.B(f"{duration(seconds)}{times}"),
        ],
        className="named" if is_named else "",
    )
