"""A run's report as one HTML file: facts in, HTML out. Pure.

Nothing of it is fetched and it has no script; its content security policy allows only its own style sheet, by its hash.
Every text of a run goes through the template's escaping. What may be long is cut, so that the file stays small."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from perfagent import __version__
from perfagent.command_line.terminal_output import CONTROL
from perfagent.wire import STATE_SHAPES, Alert, Finding, outcome_of
from perfagent.wire.configuration import by_use, flattened
from perfagent.wire.quantities import duration, some
from perfagent_client.evidence import evidence_lines, traceback_lines
from perfagent_client.report.charts import charts_of
from perfagent_client.report.facts import ReportFacts
from perfagent_client.report.line_chart import HEIGHT, WIDTH
from perfagent_client.spent import amounts, money, took_s
from perfagent_client.techniques import sentences
from perfagent_client.timing_table import about_figures, part_of_step, step_shares, timing_head, timing_rows

__all__ = ["report_html"]

_CONSOLE_LINES, _CONSOLE_CHARACTERS = 200, 60_000
_TRACEBACK_CHARACTERS = 20_000
_TABLE_ROWS, _CELL_CHARACTERS = 250, 160
_FINDINGS, _HISTORY = 10, 10
_CONTROL = {code: sign for code, sign in CONTROL.items() if code != ord("\n")}
_MARKS = {"critical": "✕", "warning": "▲", "info": "●", "healthy": "✓", "unknown": "○"}


Row = tuple[str, str]
"""Name and value."""


def report_html(facts: ReportFacts) -> str:
    verdict = _finding(facts.verdict, facts.run.state, message=2000, evidence=30_000, traceback=_TRACEBACK_CHARACTERS)
    others = [finding for finding in facts.findings if finding.rule != facts.verdict.rule]
    style = _style()
    return _templates().get_template("report.html.j2").render(
        facts=facts, run=facts.run, title=facts.run.name, policy=_policy(style), version=__version__,
        style=Markup(style),  # noqa: S704 - our own file
        state_mark=STATE_SHAPES.get(facts.run.state, "●"), head=_head(facts), marks=_MARKS, verdict=verdict,
        others=[_finding(finding, facts.run.state) for finding in others[:_FINDINGS]],
        alerts=[_alert(number, told.alert, told.history) for number, told in enumerate(facts.alerts, 1)],
        charts=charts_of(facts.series, facts.latest, [told.alert for told in facts.alerts], facts.annotations),
        width=WIDTH, height=HEIGHT,
        bar=step_shares(facts.timing), timing_head=timing_head(facts.timing), timing=_timing(facts),
        timing_note=about_figures(facts.timing, facts.run.world_size),
        spent=_spent(facts), config=_config(facts), environment=_environment(facts), packages=_packages(facts),
        console=_console(facts), traceback="" if verdict["traceback"] else _traceback(facts),
    )  # fmt: skip


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("perfagent_client.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_readable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"moment": _moment, "cut": _cut}
    return made


def _readable(value: Any) -> Any:
    """Control characters, such as the colors of a console, would be invisible."""
    return value.translate(_CONTROL) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _style() -> str:
    loader = _templates().loader
    assert loader is not None
    return loader.get_source(_templates(), "report.css")[0]


def _policy(style: str) -> str:
    """Nothing but the one style sheet of the file."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _moment(text: str | None) -> str:
    return f"{text[:19].replace('T', ' ')} UTC" if text else ""


# ------------------------------------------------------------------------------------------- what it says of the run


def _head(facts: ReportFacts) -> list[str]:
    """The facts in the line below the name."""
    run = facts.run
    parts = [f"step {run.step:,}", f"started {_moment(run.started)}"]
    if took := took_s(run):
        parts.append(f"{'took' if run.ended else 'for'} {duration(took)}")
    parts += [some(run.world_size, "rank")] if run.world_size > 1 else []
    parts += [f"attempt {run.attempts}"] if run.attempts > 1 else []
    parts += [f"on {run.host}"] if run.host else []
    return parts


def _finding(
    finding: Finding, state: str, *, message: int = 800, evidence: int = 3000, traceback: int = 2000
) -> dict[str, Any]:
    """message, evidence, traceback: at most so many characters. The message is empty where the title says it."""
    title = finding.title or finding.message
    since = [f"since step {finding.since_step:,}"] if finding.since_step is not None else []
    since += [_moment(finding.since)] if finding.since else []
    if finding.ranks:
        more = ", ..." if len(finding.ranks) > 8 else ""
        since.append(f"rank {', '.join(map(str, finding.ranks[:8]))}{more}")
    return {
        "finding": finding, "severity": outcome_of(finding, state), "title": _cut(title, message),
        "message": "" if finding.message == title else _cut(finding.message, message),
        "cause": finding.cause.replace("_", " "), "cost": finding.cost, "when": ", ".join(since),
        "evidence": _joined(evidence_lines(finding, everything=True), evidence),
        "traceback": _joined(traceback_lines(finding, None), traceback, end=True),
    }  # fmt: skip


def _alert(number: int, alert: Alert, history: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    words: list[str] = [alert.state]
    if alert.acknowledged:
        words.append(f"acknowledged by {alert.acknowledged_by}" if alert.acknowledged_by else "acknowledged")
    words += [word for word in ("muted", "snoozed", "silenced") if getattr(alert, f"{word}_until")]
    title = alert.title or alert.message
    return {"number": number, "alert": alert, "title": title, "state": ", ".join(words), "history": history[-_HISTORY:]}


def _timing(facts: ReportFacts) -> list[tuple[str, ...]]:
    return [(part_of_step(name), *row) for name, *row in timing_rows(facts.timing, facts.latest)]


def _spent(facts: ReportFacts) -> list[Row]:
    rows = [("Wall time", duration(3600 * facts.run.spent.hours))] if facts.run.spent.hours else []
    if known := amounts(facts.run.spent):
        rows.append(("Taken", ", ".join(known)))
    if cost := money(facts.run.spent):
        rows.append(("Cost", cost))
    return rows


# ------------------------------------------------------------------------------------------ configuration and console


def _config(facts: ReportFacts) -> list[Row]:
    """A row a value: nested tables have names with dots."""
    config = {name: value for name, value in by_use(facts.run.config).items() if name != "techniques"}
    rows = [line.partition(": ")[::2] for line in sentences(facts.run.config)]
    return _cut_rows([*_flat(config), *rows])


def _environment(facts: ReportFacts) -> list[Row]:
    shown = {
        name: value for name, value in facts.run.meta.items() if name != "packages" and value not in (None, "", [], {})
    }
    if isinstance(command := shown.get("command"), list):
        shown["command"] = " ".join(map(str, command))
    return _cut_rows(_flat(shown))


def _packages(facts: ReportFacts) -> list[Row]:
    packages = facts.run.meta.get("packages")
    return _cut_rows(_flat(packages)) if isinstance(packages, Mapping) else []


def _flat(table: Mapping[str, Any]) -> Iterable[Row]:
    return ((name[:_CELL_CHARACTERS], _cell(value)) for name, value in flattened(table, with_empty=True))


def _cell(value: Any) -> str:
    text = f"{value:.8g}" if isinstance(value, float) else str(value)
    return _cut(text, _CELL_CHARACTERS)


def _cut_rows(rows: Iterable[Row]) -> list[Row]:
    found = list(rows)
    more = len(found) - _TABLE_ROWS
    return found if more <= 0 else [*found[:_TABLE_ROWS], ("…", f"{more:,} more")]


def _console(facts: ReportFacts) -> str:
    """The last lines, each behind its rank where there are several."""
    lines = []
    for event in facts.logs:
        data = event.get("data") if isinstance(event.get("data"), Mapping) else None
        told = data.get("lines") if data else None
        front = f"[rank {event.get('rank')}] " if facts.run.world_size > 1 else ""
        lines += [front + str(line) for line in told] if isinstance(told, list) else []
    return _joined(lines[-_CONSOLE_LINES:], _CONSOLE_CHARACTERS, end=True)


def _traceback(facts: ReportFacts) -> str:
    """Of the process that ended last with one."""
    for event in reversed(facts.states):
        data = event.get("data")
        text = data.get("traceback") if isinstance(data, Mapping) else None
        if isinstance(text, str) and text:
            return _joined(text.splitlines(), _TRACEBACK_CHARACTERS, end=True)
    return ""


def _joined(lines: Sequence[str], characters: int, *, end: bool = False) -> str:
    """The lines as one text of at most so many characters. end: the last lines stay, not the first."""
    kept: list[str] = []
    left = characters
    for line in reversed(lines) if end else lines:
        left -= len(line) + 1
        if left < 0:
            kept.append("… " + some(len(lines) - len(kept), "more line"))
            break
        kept.append(line)
    return "\n".join(reversed(kept) if end else kept)
