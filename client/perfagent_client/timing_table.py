"""Where a step goes, as rows of text: share, median, mean and percentiles of each phase. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from perfagent.wire import PHASES, Latest, Timing, metric
from perfagent.wire.quantities import duration

__all__ = ["Share", "about_figures", "part_of_step", "step_shares", "timing_head", "timing_rows"]


class Share(NamedTuple):
    """Of the time of a step. color: one of PHASES, or "named" for a phase that the script named; time: a step, on average."""

    color: str
    series: str
    title: str
    pct: float
    time: str


def step_shares(timing: Timing, least: float = 0.002) -> list[Share]:
    """The phases in the order of a step, then those that the script named; a smaller share than `least` is not seen."""
    order = {phase: number for number, phase in enumerate(PHASES)}
    known = [(name, share) for name, share in timing.phase_shares.items() if share >= least]
    shares = []
    for name, share in sorted(known, key=lambda one: (order.get(one[0], len(order)), one[0])):
        series = f"phase/{name}_s"
        title, quantiles = metric(series).title, timing.series.get(series)
        time = duration(quantiles.mean) if quantiles is not None else ""
        shares.append(
            Share(name if name in order else "named", series, name if title == series else title, 100 * share, time)
        )
    return shares


def timing_head(timing: Timing) -> tuple[str, ...]:
    """The first column is named for the steps that the figures are about."""
    steps = str(timing.window or f"steps {timing.from_step:,} to {timing.to_step:,}")
    return (steps, "share", "median", "mean", "p90", "p99", "newest")


def timing_rows(timing: Timing, latest: Mapping[str, Latest]) -> list[tuple[str, ...]]:
    """Of the whole step, then of its phases, the longest first: the name of the series, and the other columns."""
    rows = []
    for name, phase in sorted(timing.series.items(), key=lambda item: (item[0] != "step_time_s", -item[1].mean)):
        share = 1.0 if name == "step_time_s" else timing.phase_shares.get(part_of_step(name))
        newest = duration(latest[name].value) if name in latest else ""
        figures = [duration(value) for value in (phase.p50, phase.mean, phase.p90, phase.p99)]
        rows.append((name, "" if share is None else f"{100 * share:.1f} %", *figures, newest))
    return rows


def part_of_step(series: str) -> str:
    return "whole step" if series == "step_time_s" else series.removeprefix("phase/").removesuffix("_s")


def about_figures(timing: Timing, ranks: int | None) -> str:
    """What to know of the table: whose figures these are where several ranks have their own, and what the percentiles
    are of where the server read the run in buckets."""
    notes = (
        [f"whole step: the slowest rank in each step; phases: the mean of the {ranks:,} ranks"]
        if (ranks or 1) > 1
        else []
    )
    if timing.window is not None and timing.window.bucket_steps > 1:
        notes.append(f"median, p90 and p99 are those of the means of {timing.window.bucket_steps:,} steps")
    return "; ".join(notes)
