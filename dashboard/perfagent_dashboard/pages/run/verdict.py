"""The verdict of a run: what is wrong since when, what it costs, what to do, and the chart that proves it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dash import dcc, html

from perfagent.wire import Finding, outcome_of
from perfagent_client.evidence import evidence_lines, traceback_lines
from perfagent_client.models import parse
from perfagent_dashboard.components.alert_card import alert_actions, beyond, taken
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.marks import severity_mark
from perfagent_dashboard.components.numbers import number, si
from perfagent_dashboard.components.prose import advice, prose
from perfagent_dashboard.components.rank_bars import own_work_of, rank_bars
from perfagent_dashboard.components.times import ago
from perfagent_dashboard.components.traceback import traceback_end
from perfagent_dashboard.pages.run.commands import ask_button
from perfagent_dashboard.pages.run.facts import RunFacts
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["tone_of", "verdict_band"]

_AROUND = 100
"""Steps on each side of the moment that the proving chart shows."""
_GROWS = ("memory/", "cuda/", "gpu/memory", "process/rss", "host/memory")
_MOST_OTHERS = 6
_FIRST = 6
"""Lines of evidence that are shown at once."""
_ELSEWHERE = {"proof", "also", "own_s_by_rank"}
HANGS = ("hang", "rank_absent")
_COMMAND = re.compile(r"`(perfagent [^`]+)`")


def tone_of(finding: Mapping[str, Any], state: str = "") -> str:
    """Healthy is what was judged: before anything came there is nothing to be glad of."""
    return outcome_of(parse(Finding, finding), state)


def verdict_band(facts: RunFacts) -> Component:
    verdict = facts.verdict
    tone = tone_of(verdict, facts.run["state"])
    title = verdict["title"] or verdict["message"] or say("judging")
    alert = facts.alert_of(verdict["rule"])
    says = [
        html.P(prose(more)) if (more := beyond(title, verdict["message"])) else None,
        html.P(_facts(facts, verdict), className="when"),
        html.P(taken(alert), className="taken") if alert is not None and taken(alert) else None,
        _fix(facts, verdict),
        html.Div(_doing(facts, verdict, alert), className="actions"),
        _others(facts),
        _earlier(facts) if tone == "healthy" else None,
        html.P(prose(say("no_agent")), className="quiet") if not facts.run["host"] and tone != "critical" else None,
    ]
    proves = [_proof(facts, verdict, tone), _why(verdict, is_open=tone == "critical")]
    return html.Section(
        [
            html.Header([severity_mark(tone), html.H2(prose(title))]),
            html.Div(says, className="says"),
            html.Div(proves, className="proves") if any(proves) else None,
        ],
        className=f"verdict card {tone}",
        **hyphenated(aria_label=say("verdict"), data_rule=verdict["rule"]),
    )


def _facts(facts: RunFacts, finding: Mapping[str, Any]) -> list[Component]:
    """Since when, on which ranks, of which cause, and what it costs."""
    parts: list[Any] = []
    if finding["since_step"] is not None:
        parts.append(html.Span(say("since_step", step=f"{finding['since_step']:,}")))
    if finding["since"]:
        parts.append(ago(finding["since"]))
    ranks = finding["ranks"]
    if ranks and facts.ranks > 1:
        named = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
        parts.append(html.Span(say("on_ranks", ranks=named)))
    if finding["cause"]:
        parts.append(html.Span(say("cause", cause=finding["cause"].replace("_", " "))))
    if finding["cost"]:
        parts.append(html.Span(say("costs", cost=finding["cost"])))
    gain = number(finding["gain_pct"])
    if gain:
        parts.append(html.Span(say("gain", gain=f"{gain:.0f}" if gain >= 10 else si(gain)), className="gain"))
    return parts


def _fix(facts: RunFacts, finding: Mapping[str, Any]) -> Component | None:
    steps = advice(_named(finding["fix"], facts.id))
    if steps is None:
        return None
    proof = finding["evidence"].get("proof")
    proved = html.P([say("fixed_when"), " ", *prose(_named(proof, facts.id))], className="quiet") if proof else None
    return html.Div([html.H3(say("fix")), steps, proved], className="fix")


def _named(text: str, run: str) -> str:
    """Commands with the id of the run in them, so that they can be copied as they are."""
    return _COMMAND.sub(lambda found: f"`{re.sub(r'RUN', run, found[1])}`", text)


def _doing(facts: RunFacts, finding: Mapping[str, Any], alert: Mapping[str, Any] | None) -> list[Component]:
    """What can be done about it from here."""
    parts: list[Any] = []
    if alert is not None and "operate" in facts.may:
        parts.append(alert_actions(dict(alert), "verdict"))
    fix = _named(finding["fix"], facts.id)
    if facts.has_stacks and finding["rule"] in HANGS:
        goes = hyphenated(data_goto="tab:ranks")
        parts.append(html.Button(say("see_stacks"), type="button", className="button", **goes))
    if "perfagent stacks" in fix or finding["rule"] in HANGS:
        parts.append(ask_button(facts, "stacks", "verdict"))
    if "perfagent profile" in fix or _is_slow(facts, finding):
        parts.append(ask_button(facts, "profile", "verdict"))
    parts += [
        html.Span([html.Code(command), dcc.Clipboard(content=command, title=say("copy"))], className="command")
        for command in dict.fromkeys(_COMMAND.findall(fix))
    ]
    if alert is not None and "operate" not in facts.may:
        parts.append(html.P(prose(say("may_not_act")), className="quiet"))
    return [part for part in parts if part is not None]


def _is_slow(facts: RunFacts, finding: Mapping[str, Any]) -> bool:
    """A profile helps where the time of a step is the matter."""
    return any(name == "step_time_s" or name.startswith("phase/") for name in facts.marks.get(finding["rule"], ()))


def _proof(facts: RunFacts, finding: Mapping[str, Any], tone: str) -> Component | None:
    """Where the finding can be seen: the work of the ranks, or a chart, around the step in which it began; of memory, which
    grows for long, over the whole run."""
    own = own_work_of([finding])
    if own:
        return rank_bars(own, finding["ranks"])
    step = finding["since_step"]
    series = [finding["evidence"].get("series"), *facts.marks.get(finding["rule"], ())]
    name = next((one for one in series if one in facts.names), None)
    if tone in ("healthy", "info") or name is None or step is None:
        return None
    window = f"{max(0, step - _AROUND)}-{max(step, min(facts.run['step'], step + _AROUND))}"
    return html.Div(
        className="board proof",
        **hyphenated(
            data_run=facts.id, data_names=name, data_x="" if name.startswith(_GROWS) else window, data_marks=str(step),
            data_bare="1",
        ),
    )  # fmt: skip


def _why(finding: Mapping[str, Any], *, is_open: bool) -> Component | None:
    """All that the finding rests on: figures, causes that the agent found, the batch, the memory, the traceback's end."""
    known = parse(Finding, dict(finding))
    lines = evidence_lines(replace(known, evidence=_rest(known.evidence)), everything=True)
    trace = traceback_lines(known, None)
    remedies = _remedies(finding)
    if not (lines or trace or remedies):
        return None
    rest = html.Details([html.Summary(say("all_evidence", count=len(lines))), _evidence(lines[_FIRST:])])
    return html.Details(
        [
            html.Summary(say("why")),
            traceback_end(trace) if trace else None,
            _evidence(lines[:_FIRST]) if lines else None,
            rest if len(lines) > _FIRST else None,
            *([html.H3(say("also_helps")), html.Ul([html.Li(prose(one)) for one in remedies])] if remedies else []),
        ],
        open=is_open, className="why",
    )  # fmt: skip


def _rest(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Without what stands elsewhere in the band."""
    return {name: value for name, value in evidence.items() if name not in _ELSEWHERE}


def _evidence(lines: Sequence[str]) -> Component:
    """`label: value` as a small table; a line that is indented belongs to the one above it."""
    rows: list[Component] = []
    for line in lines:
        label, found, value = line.strip().partition(": ")
        is_part = line.startswith(" ")
        shown = label if is_part else label[:1].upper() + label[1:]  # a part may be a variable: `x` is not `X`
        cells = [html.Dt(shown), html.Dd(prose(value))] if found else [html.Dd(prose(label), className="whole")]
        rows.append(html.Div(cells, className="part" if is_part else ""))
    return html.Dl(rows, className="evidence", **hyphenated(aria_label=say("evidence")))


def _remedies(finding: Mapping[str, Any]) -> list[str]:
    """Other things that help, where the rule tells some."""
    told = finding["evidence"].get("remedies")
    return [str(one) for one in told] if isinstance(told, list) else []


def _others(facts: RunFacts) -> Component | None:
    """What else is found now, a line each, with what can be done about it."""
    told = [one for one in facts.findings if one["rule"] not in (facts.verdict["rule"], "healthy")]
    if not told:
        return None
    rows = []
    for one in told[:_MOST_OTHERS]:
        alert = facts.alert_of(one["rule"])
        rows.append(
            html.Div(
                [
                    severity_mark(tone_of(one)),
                    html.Details(
                        [
                            html.Summary(prose(one["title"] or one["message"])),
                            html.P(prose(beyond(one["title"], one["message"]))),
                            advice(_named(one["fix"], facts.id)),
                        ]
                    ),
                    alert_actions(dict(alert), "other") if alert is not None and "operate" in facts.may else None,
                ],
                className="other",
            )
        )
    return html.Div([html.H3(say("also")), *rows], className="also")


def _earlier(facts: RunFacts) -> Component | None:
    """What a run that is well now has recovered from."""
    past = [alert for alert in facts.alerts if alert["state"] == "resolved" and alert["severity"] != "info"][:3]
    told = {one["rule"] for one in facts.findings}
    rows = [
        html.P(
            [
                severity_mark(alert["severity"]),
                " ",
                *prose(alert["title"] or alert["message"]),
                " · ",
                ago(alert["resolved"]),
            ]
        )
        for alert in past
        if alert["rule"] not in told
    ]
    return html.Div([html.H3(say("earlier")), *rows], className="also") if rows else None
