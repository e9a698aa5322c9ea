"""The parts of a run's screen as lines that fit a width. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import cycle, pairwise

from rich.text import Text

from perfagent.wire import STATE_SHAPES, metric, outcome_of
from perfagent.wire.quantities import duration, figure
from perfagent_client.sparkline import sparkline
from perfagent_client.spent import paused_s, took_s
from perfagent_client.timing_table import step_shares
from perfagent_client.watch.fleet import RATES
from perfagent_client.watch.run_view import NEWEST, RunView
from perfagent_client.watch.words import MARKS, SEVERITY_STYLES, age, clean, cut, newest, seconds_of

__all__ = ["alert_lines", "console_lines", "curve_lines", "figure_lines", "head_lines", "step_lines", "verdict_lines"]

_PHASE_STYLES = {
    "data": "magenta", "h2d": "yellow", "forward": "cyan", "backward": "blue", "optimizer": "green", "comm": "red",
    "checkpoint": "bright_yellow", "eval": "bright_cyan",
}  # fmt: skip
_BLOCKS = "█▓▒░"
"""Parts beside each other differ without colors too."""
_LABEL = 18


def head_lines(view: RunView, width: int, now: float) -> list[Text]:
    run = view.run
    state = f"{STATE_SHAPES.get(run.state, '●')} {run.state}" + (f": {run.reason}" if run.reason else "")
    facts = [state, f"step {run.step:,}"]
    facts += [f"{run.world_size} ranks"] if run.world_size > 1 else []
    facts += [f"attempt {run.attempts}"] if run.attempts > 1 else []
    began, ended, heard = (seconds_of(moment) for moment in (run.started, run.ended, run.updated))
    if began is not None:
        took = took_s(run)
        how_long = (
            f"took {duration(took if took < 1 else round(took))}"
            if ended
            else f"for {age(now - began - paused_s(run))}"
        )
        facts.append(how_long)
    if heard is not None and ended is None:
        facts.append(f"heard {age(now - heard)} ago")
    facts += [f"on {run.host}"] if run.host else []
    return [
        Text(cut(f"{run.name}  ({run.project}, {run.run})", width), style="bold"),
        *(Text(line) for line in _wrap(" · ".join(facts), width)),
    ]


def verdict_lines(view: RunView, width: int) -> list[Text]:
    """Title, the sentence, what it costs and what to do."""
    verdict = view.verdict
    severity = outcome_of(verdict, view.run.state)
    style = SEVERITY_STYLES.get(severity, "")
    title = verdict.title or verdict.message
    rule = "" if verdict.rule == "healthy" else f"{verdict.rule}: "
    lines = [Text(line, style=style) for line in _wrap(f"{MARKS.get(severity, '●')} {severity}  {rule}{title}", width)]
    if verdict.message != title:
        lines += [Text(line) for line in _wrap(verdict.message, width, indent=2)]
    for word, text in (("Cost", verdict.cost), ("Fix", verdict.fix)):
        lines += [Text(line) for line in _wrap(f"{word}: {text}", width, indent=2)] if text else []
    return lines


def figure_lines(view: RunView, width: int) -> list[Text]:
    """Medians over the server's window, and newest values, side by side as far as they fit."""
    timing = view.timing
    rate = next((name for name in RATES if name in timing.rates), None)
    fast = [figure(rate, timing.rates[rate].p50)] if rate else []
    fast += [f"{duration(timing.series['step_time_s'].p50)} a step"] if "step_time_s" in timing.series else []
    cells = [f"{', '.join(fast)} (median of {timing.window or 'its steps'})"] if fast else []
    cells += [f"data wait {100 * timing.phase_shares['data']:.3g} %"] if "data" in timing.phase_shares else []
    latest = {name: view.latest[name].value for name in NEWEST if name in view.latest}
    cells += [f"{metric(name).title} {figure(name, value)}" for name, value in latest.items()]
    return _flowing([(cell, "") for cell in cells], width) if cells else []


def curve_lines(view: RunView, width: int) -> list[Text]:
    """Label, curve of the whole run, newest value."""
    lines = []
    for name, values in view.curves.items():
        now = view.latest.get(name)
        value = "" if now is None else newest(name, now.value)
        room = max(8, width - _LABEL - 1 - 18)
        line = Text(cut(metric(name).title, _LABEL).ljust(_LABEL) + " ")
        line.append(sparkline(_resampled(values, room)).ljust(room), style="cyan")
        line.append(f" {cut(value, 17)}")
        lines.append(line)
    return lines


def step_lines(view: RunView, width: int) -> list[Text]:
    """Where a step goes: a bar, and what its parts are."""
    shares = step_shares(view.timing, 0.005)
    if not shares:
        return []
    bar, legend = Text(), []
    whole, total = max(100.0, sum(one.pct for one in shares)), 0.0
    for one, block in zip(shares, cycle(_BLOCKS), strict=False):
        name = one.series.removeprefix("phase/").removesuffix("_s")
        total += one.pct
        style = _PHASE_STYLES.get(name, "bright_black")
        bar.append(block * (round(total / whole * width) - len(bar)), style=style)
        legend.append((f"{block} {clean(name)} {one.pct:.3g} %", style))
    return [bar, *_flowing(legend, width)]


def alert_lines(view: RunView, width: int) -> list[Text]:
    lines = []
    for alert in view.alerts[:8]:
        words: list[str] = [alert.state]
        words += [f"seen by {alert.acknowledged_by or 'somebody'}"] if alert.acknowledged else []
        words += [word for word in ("muted", "snoozed", "silenced") if getattr(alert, f"{word}_until")]
        step = f" since step {alert.since_step:,}" if alert.since_step is not None else ""
        style = SEVERITY_STYLES.get(alert.severity, "") if alert.state == "firing" else "dim"
        text = f"{MARKS.get(alert.severity, '●')} {alert.severity}  {alert.title or alert.message}"
        lines += [Text(line, style=style) for line in _wrap(text, width, hang=2)]
        lines.append(
            Text(cut(f"  {', '.join(words)}{step}" + (f": {alert.note}" if alert.note else ""), width), style="dim")
        )
    return lines or [Text("no alert has fired", style="dim")]


def console_lines(view: RunView, width: int, most: int) -> list[Text]:
    return [Text(cut(line, width)) for line in view.console[-most:]] or [Text("no line yet", style="dim")]


def _wrap(text: str, width: int, *, indent: int = 0, hang: int = 0) -> list[str]:
    """indent: of all lines; hang: more, of those after the first."""
    front, rest = " " * indent, " " * (indent + hang)
    return textwrap.wrap(clean(text), max(10, width), initial_indent=front, subsequent_indent=rest) or [""]


def _flowing(parts: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """As many beside each other as fit."""
    lines, line = [], Text()
    for text, style in parts:
        if len(line) and len(line) + 3 + len(text) > width:
            lines.append(line)
            line = Text()
        line.append("   " if len(line) else "")
        line.append(cut(text, width), style=style)
    return [*lines, line]


def _resampled(values: list[float], count: int) -> list[float]:
    """At most so many: the mean of those that fall together; NaN where one of them is."""
    if len(values) <= count:
        return values
    ends = [len(values) * number // count for number in range(count + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
