"""What docs/reference/rules.md says, from the rules: a heading a rule, with what it means, when it fires and what to do.
`scripts/references` writes it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfagent.wire.quantities import some
from perfagent_server.rules.catalogue import all_rules, inputs
from perfagent_server.rules.rule import Question, Rule, unit_of

__all__ = ["MEASURED", "handbook", "measured", "seen_in_demo", "tally"]

MEASURED = Path(__file__).with_name("measured.json")
"""Rule -> what scripts/detection measured of it, and the fault of the demo that it named."""

_QUESTIONS = {
    Question.IS_IT_DEAD: "Is it dead, and of what?",
    Question.ARE_ITS_NUMBERS_FINITE: "Are its numbers finite?",
    Question.DOES_IT_MOVE: "Does it move, and is it heard?",
    Question.DOES_IT_LEARN: "Does it learn?",
    Question.WILL_IT_GO_ON: "Will it continue?",
    Question.IS_IT_FAST: "Is it fast?",
}

_FRAME = Path(__file__).with_name("texts") / "handbook.txt"
"""What stands around the sections of the rules."""


def handbook(pages: Mapping[str, str]) -> str:
    """The document. pages: rule -> links to the pages that explain what people see."""
    parts: list[str] = []
    question: Question | None = None
    for rule in all_rules():
        if rule.question is not question:
            question = rule.question
            parts.append(f"## {_QUESTIONS[question]}\n\n")
        parts.append(_section(rule))
    filled = _FRAME.read_text("utf-8")
    for name, text in (
        ("tally", textwrap.fill(tally(), 119)),
        ("table", _by_symptom(pages)),
        ("rules", "".join(parts).rstrip() + "\n"),
    ):
        filled = filled.replace(f"{{{name}}}", text)
    return filled


def _by_symptom(pages: Mapping[str, str]) -> str:
    """A table: what somebody sees, the rule that tells of it, and pages about it."""
    rows = [f"| {rule.text().symptom} | {_link(rule)} | {pages.get(rule.id, '')} |" for rule in all_rules()]
    return "\n".join(["| you see | the rule | reasons and fixes |", "| --- | --- | --- |", *rows, ""])


def _link(rule: Rule) -> str:
    heading = re.sub(r"[^\w\- ]", "", f"{rule.id} {rule.text().name}").lower()
    return f"[`{rule.id}`](#{heading.replace(' ', '-')})"


def _section(rule: Rule) -> str:
    words = rule.text()
    lines = [f"### `{rule.id}`: {words.name}", "", f"**What it means:** {words.meaning}", ""]
    lines += [f"**When it fires** ({', '.join(rule.severities)}): {words.fires.format(**rule.thresholds())}", ""]
    lines += [f"**Measured:** {measured(rule)}", ""]
    if rule.level:
        window, unit = getattr(rule, rule.level), unit_of(rule.level)
        held = f"the alert opens when this has held for {window:g} {unit} more"
        lines += [f"**Held:** {held}. It is resolved when this was gone for as long, and for a minute at least.", ""]
    if rule.asks_for:
        lines += [f"**It asks every rank** for `{rule.asks_for}` when it fires.", ""]
    if rule.profile_helps:
        lines += ["**Profile:** taken when it fires, if the project [wants it](#profiles-when-a-rule-fires).", ""]
    others = [f"- *{cause}:* {remedy}" for cause, remedy in words.remedies.items() if cause]
    lines += [f"**What to do:** {words.remedies['']}", "", *others, *([""] if others else [])]
    lines += [f"**Inputs:** {', '.join(f'`{one}`' for one in inputs(rule))}.", ""]
    return "\n".join(lines) + "\n"


def tally() -> str:
    """How many rules were tested in which way. README.md says the same."""
    rules = all_rules()
    figures = _figures()
    rated = [rule for rule in rules if _is_rated(figures.get(rule.id, {}))]
    unseen = [rule for rule in rules if rule.needs_card and rule not in rated]
    rest = [rule for rule in rules if rule not in (*rated, *unseen)]
    demo = sum("demo" in figures.get(rule.id, {}) for rule in rest)
    return (
        f"{len(rated)} of the {len(rules)} rules were measured on labeled runs or programs. {len(unseen)} need a GPU "
        f"and were never tried on one. {len(rest)} were tested on synthetic series, {demo} of them also in the demo."
    )


def _is_rated(found: dict[str, Any]) -> bool:
    return "total" in found or bool(found.get("programs", {}).get("should"))


def _figures() -> dict[str, dict[str, Any]]:
    return json.loads(MEASURED.read_text("utf-8")) if MEASURED.exists() else {}


def measured(rule: Rule) -> str:
    """What scripts/detection, the sick programs and the demo showed of a rule, in a sentence."""
    found = _figures().get(rule.id, {})
    said = [_of_programs(found["programs"])] if "programs" in found else []
    said += [seen_in_demo(found["demo"])] if "demo" in found else []
    if "total" in found:
        said.append(f"{_shares(found)} ([detection.md](../evidence/detection.md))")
    elif _is_rated(found):
        said[-1] += " ([detection.md](../evidence/detection.md#sick-trainings))"
    elif rule.needs_card:
        said.append("not yet seen on a card: tested on recorded and made-up series, without a claim of precision")
    else:
        said.append("no labeled data: tested on synthetic series")
    return f"{'; '.join(said)}."


def _of_programs(found: dict[str, Any]) -> str:
    """named in 4 of 5 sick programs; no false alarm in 74 healthy ones"""
    false = some(found["healthy_false"], "false alarm") if found["healthy_false"] else "no false alarm"
    named = f"named in {found['named']} of {some(found['should'], 'sick program')}; " if found["should"] else ""
    return f"{named}{false} in {some(found['healthy'], 'healthy program')}"


def seen_in_demo(named: dict[str, Any]) -> str:
    """named in the demo (`data-stall`: after 24 steps, 6.7 s)"""
    after = f"after {some(named['steps'], 'step')}" if named["steps"] else "in the same step"
    return f"named in the demo (`{named['fault']}`: {after}, {named['seconds']:.3g} s)"


def _shares(found: dict[str, Any]) -> str:
    """Each with the numbers that it was made of."""
    caught, total, false = found["found"], found["total"], found["false_alerts"]
    raised = caught + false
    precision = f"precision {caught / raised:.3f} ({caught:,} of {some(raised, 'alert')}), " if raised else ""
    recall = f"recall {caught / total:.3f} ({caught:,} of {some(total, 'fault')}{_how_late(found)})"
    healthy, tested = found["healthy_steps"], found["tested_steps"]
    if tested == healthy:
        where = "no threshold was chosen on them"
    else:
        where = (
            f"on {tested:,} of them no threshold was chosen" if tested else "thresholds were chosen with a look at them"
        )
    return f"{precision}{recall}; {some(false, 'false alert')}; {some(healthy, 'healthy step')}: {where}"


def _how_late(found: dict[str, Any]) -> str:
    if found["most_steps"] is None:
        return ""
    if found["most_steps"] == 0:
        return ", in the step in which they began"
    return f", within {some(found['most_steps'], 'step')}; median {found['median_steps']}"
