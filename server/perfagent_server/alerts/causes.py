"""Joins what an agent found out to a finding of the server: the module where a NaN began, what filled the memory.

The agent looks after the fact and reports some steps later, or before the process ends and the rule can see it:
whichever comes first waits for the other. Pure: lists and findings in, findings changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perfagent.wire import Finding
from perfagent.wire.limits import whole
from perfagent_server.alerts.evidence_limit import limited
from perfagent_server.rules.causes import CauseWords, cause_words
from perfagent_server.rules.texts import said_in

__all__ = ["MOST", "and_then", "cause_of", "join", "title_of"]

MOST = 16
"""Causes that wait for their finding, of one run."""
MOST_JOINED = 8
NEAR_STEPS = 100
"""A cause belongs to a finding that began at most so many steps from it."""


def cause_of(data: Mapping[str, Any], rank: int, step: int) -> dict[str, Any] | None:
    """What a finding event with `explains` says, as it is kept; None when it says nothing that can be used. In sentences
    of the sender's where it sent no facts."""
    explains = data.get("explains")
    evidence = data.get("evidence")
    if not isinstance(explains, list) or not isinstance(evidence, dict):
        return None
    since = data.get("since_step")
    words = cause_words({**evidence, "rank": rank}) or CauseWords(_text(data, "message"), _text(data, "fix"))
    return {
        "explains": [rule[:64] for rule in explains if isinstance(rule, str)][:8], "rank": rank,
        "step": since if isinstance(since, int) else step, "message": words.message, "fix": words.fix,
        "evidence": limited(evidence | ({"says": [*words.says]} if words.says else {})),
    }  # fmt: skip


def _text(data: Mapping[str, Any], name: str) -> str:
    return str(data.get(name) or "")[:2000]


def join(causes: Iterable[Mapping[str, Any]], finding: Finding) -> bool:
    """Puts what explains a finding into its evidence as `causes`, the earliest step first, whose sentence ends the
    message, also where one of a later step had come before it.

    False when there was nothing to add.
    """
    known = _known(finding)
    ranks = {entry["rank"] for entry in known}
    fresh = [
        cause
        for cause in causes
        if finding.rule in cause["explains"]
        and cause["rank"] not in ranks
        and (finding.since_step is None or abs(cause["step"] - finding.since_step) <= NEAR_STEPS)
    ]
    # Of one rank the newest look counts: memory that ran out and was caught earlier is another story.
    newest = {cause["rank"]: cause for cause in fresh}
    if not newest:
        return False
    said = [{**cause["evidence"], "rank": cause["rank"], "message": cause["message"]} for cause in newest.values()]
    finding.evidence = {**finding.evidence, "causes": sorted([*known, *said], key=_order)[:MOST_JOINED]}
    _date(finding, newest.values())
    first = finding.evidence["causes"][0]
    if not known or _order(first)[0] < _order(known[0])[0]:
        before = known[0]["message"] if known else ""
        finding.message = and_then(finding.message.removesuffix(before).rstrip(), first["message"])
        fixes = [newest[first["rank"]]["fix"], *(cause["fix"] for cause in newest.values())]
        finding.fix = next((fix for fix in fixes if fix), finding.fix)
    return True


def _date(finding: Finding, causes: Iterable[Mapping[str, Any]]) -> None:
    """Dates a finding to the step in which it began, where a cause knows that (a loss that is NaN since the update of the
    step before). Its title says so, if it has the figure `began_step`."""
    known = [began for cause in causes if (began := _began(cause["evidence"])) is not None]
    if known and finding.since_step is not None and min(known) < finding.since_step:
        finding.since_step = min(known)
        finding.evidence["began_step"] = finding.since_step
        finding.title = title_of(finding)


def title_of(finding: Finding) -> str:
    """Its title, by its evidence as it is now."""
    words = said_in(finding.rule, finding.cause, finding.evidence, "en")
    return finding.title if words is None else words.title


def _began(evidence: Mapping[str, Any]) -> int | None:
    """The one step in which it began, if that is known; a sender may have sent anything."""
    began = evidence.get("began")
    if not isinstance(began, dict):
        return None
    first, last = whole(began.get("first")), whole(began.get("last"))
    return first if first == last else None


def and_then(said: str, cause: str) -> str:
    """A message and what explains it. What a rule quotes at its end, an exception's text, mostly lacks the full
    stop."""
    if cause and (said[-1:].isalnum() or said.endswith((")", "]", "}", "'", '"'))):
        said += "."
    return f"{said} {cause}".strip()


def _known(finding: Finding) -> list[Mapping[str, Any]]:
    """The causes that joined it already. Evidence that a sender made may hold anything under that name: it is no cause
    then."""
    causes = finding.evidence.get("causes")
    entries = causes if isinstance(causes, list) else []
    return [
        entry
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("rank"), int) and isinstance(entry.get("message"), str)
    ]


def _order(entry: Mapping[str, Any]) -> tuple[int, int]:
    step = entry.get("step")
    return (step if isinstance(step, int) else 2**53, entry["rank"])
