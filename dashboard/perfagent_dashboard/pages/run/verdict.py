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
from perfagent_dashboard.components.prose import advice, prose, steps
from perfagent_dashboard.components.rank_bars import own_work_of, rank_bars
from perfagent_dashboard.components.times import ago
from perfagent_dashboard.components.traceback import traceback_end
from perfagent_dashboard.pages.run.commands import ask_button
from perfagent_dashboard.pages.run.facts import RunFacts
from perfagent_dashboard.words import say

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["tone_of", "tone_of_run", "verdict_band"]

_AROUND = 100
"""Steps on each side of the moment that the proving chart shows."""
_GROWS = ("memory/", "cuda/", "gpu/memory", "process/rss", "host/memory")
_MOST_OTHERS = 6
_ELSEWHERE = {"proof", "also", "own_s_by_rank"}
HANGS = ("hang", "rank_absent")
_COMMAND = re.compile(r"`(perfagent [^`]+)`")


def tone_of(finding: Mapping[str, Any], state: str = "") -> str:
    """Healthy is what was judged: before anything came there is nothing to be glad of."""
    return outcome_of(parse(Finding, finding), state)


def tone_of_run(facts: RunFacts) -> str:
    """Never that all is well beside something that was found, but for what merely says where the time goes."""
    tone = tone_of(facts.verdict, facts.run["state"])
    return "info" if tone == "healthy" and any(one["rule"] != "compute_bound" for one in _told(facts)) else tone


def verdict_band(facts: RunFacts) -> Component:
    """What, since when and at what cost, and the first thing to do; everything else in a fold."""
    verdict = facts.verdict
    tone = tone_of_run(facts)
    title = verdict["title"] or verdict["message"] or say("judging")
    alert = facts.alert_of(verdict["rule"])
    what_to_do = steps(_named(verdict["fix"], facts.id))
    rest = beyond(title, verdict["message"])
    says = [
        html.P([*_facts(facts, verdict), *(taken(alert) if alert is not None else [])], className="when"),
        html.P(prose(rest), className="rest", title=rest) if rest else None,
        html.P([html.B(say("first")), " ", *prose(what_to_do[0])], className="first") if what_to_do else None,
    ]
    proof = _proof(facts, verdict, tone)
    doing = html.Div(_doing(facts, verdict, alert), className="actions")
    return html.Section(
        [
            html.Header([severity_mark(tone), html.H2(prose(title)), doing]),
            html.Div(says, className="says"),
            html.Div(proof, className="proves") if proof is not None else None,
            _rest(facts, rest, alert),
        ],
        className=f"verdict card {tone}",
        **hyphenated(aria_label=say("verdict"), data_rule=verdict["rule"]),
    )


def _rest(facts: RunFacts, rest: str, alert: Mapping[str, Any] | None) -> Component | None:
    """What it rests on, all that can be done, what else is found, and what the run has recovered from. rest: of the
    message."""
    verdict, others = facts.verdict, _others(facts)
    may_not_act = alert is not None and "operate" not in facts.may
    parts = [
        html.P(prose(rest)) if rest else None,
        _fix(facts, verdict) if verdict["fix"] else None,
        _why(verdict),
        _commands(facts),
        others,
        _earlier(facts) if verdict["rule"] == "healthy" else None,
        html.P(prose(say("no_agent")), className="quiet") if not facts.run["host"] else None,
        html.P(say("may_not_act"), className="quiet") if may_not_act else None,
    ]
    if not any(parts):
        return None
    told = [say("why_and_more"), html.Span(say("also_count", count=len(_told(facts)))) if others is not None else None]
    return html.Details([html.Summary(told), *parts], className="more")


def _facts(facts: RunFacts, finding: Mapping[str, Any]) -> list[Component]:
    """Since when, on which ranks, and what it costs. The cause, which rules name in English, is in the sentences."""
    parts: list[Any] = []
    if finding["since_step"] is not None:
        parts.append(html.Span(say("since_step", step=finding["since_step"])))
    if finding["since"]:
        parts.append(ago(finding["since"]))
    ranks = finding["ranks"]
    if ranks and facts.ranks > 1:
        named = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
        parts.append(html.Span(say("on_ranks", count=len(ranks), ranks=named)))
    if finding["cost"]:
        parts.append(html.Span(say("costs", cost=finding["cost"])))
    gain = number(finding["gain_pct"])
    if gain:
        parts.append(html.Span(say("gain", gain=f"{gain:.0f}" if gain >= 10 else si(gain)), className="gain"))
    return parts


def _fix(facts: RunFacts, finding: Mapping[str, Any]) -> Component:
    """All steps, and what else helps."""
    told = finding["evidence"].get("remedies")
    others = [str(one) for one in told] if isinstance(told, list) else []
    proof = finding["evidence"].get("proof")
    proved = html.P([say("fixed_when"), " ", *prose(_named(proof, facts.id))], className="quiet") if proof else None
    also = [html.H3(say("also_helps")), html.Ul([html.Li(prose(one)) for one in others])] if others else []
    return html.Div([html.H3(say("fix")), advice(_named(finding["fix"], facts.id)), proved, *also], className="fix")


def _named(text: str, run: str) -> str:
    """Commands with the id of the run in them, so that they can be copied as they are."""
    return _COMMAND.sub(lambda found: f"`{re.sub(r'RUN', run, found[1])}`", text)


def _doing(facts: RunFacts, finding: Mapping[str, Any], alert: Mapping[str, Any] | None) -> list[Component]:
    """What can be done about it from here."""
    parts: list[Any] = [_acts(facts, alert, "verdict")]
    fix = _named(finding["fix"], facts.id)
    if facts.has_stacks and finding["rule"] in HANGS:
        goes = hyphenated(data_goto="tab:ranks")
        parts.append(html.Button(say("see_stacks"), type="button", className="button", **goes))
    if "perfagent stacks" in fix or finding["rule"] in HANGS:
        parts.append(ask_button(facts, "stacks", "verdict"))
    if "perfagent profile" in fix or _is_slow(facts, finding):
        parts.append(ask_button(facts, "profile", "verdict"))
    return [part for part in parts if part is not None]


def _acts(facts: RunFacts, alert: Mapping[str, Any] | None, at: str) -> Component | None:
    return alert_actions(dict(alert), at) if alert is not None and "operate" in facts.may else None


def _commands(facts: RunFacts) -> Component | None:
    """To be copied as they are."""
    found = dict.fromkeys(_COMMAND.findall(_named(facts.verdict["fix"], facts.id)))
    rows = [
        html.Span([html.Code(one), dcc.Clipboard(content=one, title=say("copy"))], className="command") for one in found
    ]
    return html.Div(rows, className="commands") if rows else None


def _is_slow(facts: RunFacts, finding: Mapping[str, Any]) -> bool:
    """A profile helps where the time of a step is the matter."""
    return any(name == "step_time_s" or name.startswith("phase/") for name in facts.marks.get(finding["rule"], ()))


def _proof(facts: RunFacts, finding: Mapping[str, Any], tone: str) -> Component | None:
    """Where the finding can be seen: the end of a traceback, the work of the ranks, or a chart around the step in which it
    began; of memory, which grows for long, over the whole run."""
    if trace := traceback_lines(parse(Finding, dict(finding)), None):
        return traceback_end(trace)
    if own := own_work_of([finding]):
        return rank_bars(own, finding["ranks"], number(finding["evidence"].get("typical_own_s")))
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


def _why(finding: Mapping[str, Any]) -> Component | None:
    """All that the finding rests on: figures, causes that the agent found, the batch, the memory."""
    known = parse(Finding, dict(finding))
    evidence = {name: value for name, value in known.evidence.items() if name not in _ELSEWHERE}
    lines = evidence_lines(replace(known, evidence=evidence), everything=True)
    if not lines:
        return None
    return html.Details([html.Summary(say("all_evidence", count=len(lines))), _evidence(lines)], className="why")


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


def _told(facts: RunFacts) -> list[Mapping[str, Any]]:
    return [one for one in facts.findings if one["rule"] not in (facts.verdict["rule"], "healthy")]


def _others(facts: RunFacts) -> Component | None:
    """What else is found now, a line each, with what can be done about it."""
    told = _told(facts)
    if not told:
        return None
    rows: list[Component] = []
    for one in told[:_MOST_OTHERS]:
        summary = html.Summary(prose(one["title"] or one["message"]))
        rest = html.P(prose(beyond(one["title"], one["message"])))
        more = html.Details([summary, rest, advice(_named(one["fix"], facts.id))])
        acts = _acts(facts, facts.alert_of(one["rule"]), "other")
        rows.append(html.Div([severity_mark(tone_of(one)), more, acts], className="other"))
    if (left := len(told) - len(rows)) > 0:
        rows.append(html.P(say("and_more", count=left), className="quiet"))
    return html.Div([html.H3(say("also")), *rows], className="also")


def _earlier(facts: RunFacts) -> Component | None:
    """What a run that is well now has recovered from."""
    past = [alert for alert in facts.alerts if alert["state"] == "resolved" and alert["severity"] != "info"][:3]
    told = {one["rule"] for one in facts.findings}
    rows = []
    for alert in (one for one in past if one["rule"] not in told):
        said = prose(alert["title"] or alert["message"])
        rows.append(html.P([severity_mark(alert["severity"]), " ", *said, " · ", ago(alert["resolved"])]))
    return html.Div([html.H3(say("earlier")), *rows], className="also") if rows else None
