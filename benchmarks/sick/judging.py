"""Whether a tool was right about a program, and why not: pure functions on a record of running.py, so that a record can
be judged again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sick.expectations import Expectation

__all__ = ["Judgment", "is_accepted", "judged"]

LOUD = ("warning", "critical")

Finding = Mapping[str, Any]


@dataclass(frozen=True)
class Judgment:
    """faults: why it is not right. notes: what else is to be known. silent: no alert at warning or critical. named: the
    accepted rules that spoke, false: those whose alerts nothing explains. state and verdict: those that count. latency_s:
    from the onset that the program told to the first right alert. cause: whether the finding names what the expectation
    says that a good one names; "" where it says nothing."""

    faults: tuple[str, ...]
    notes: tuple[str, ...]
    silent: bool
    named: tuple[str, ...]
    false: tuple[str, ...]
    state: str
    verdict: str
    message: str
    alerts: tuple[str, ...]
    latency_s: float | None
    cause: str

    @property
    def right(self) -> bool:
        return not self.faults


def is_accepted(finding: Finding, expected: Expectation) -> bool:
    pattern = expected.accept.get(finding.get("rule", ""))
    return pattern is not None and re.search(pattern, finding.get("message") or "", re.IGNORECASE) is not None


def judged(record: Mapping[str, Any], expected: Expectation) -> Judgment:
    """Of a program that was ended only what was said before that counts: its end is our doing."""
    is_live = record["cut"] or expected.judge == "live"
    parts = [record["live"]] if is_live else [record["live"], record["ended"]]
    alerts = record["alerts_live"] if is_live else record["alerts"]
    loud = [one for one in alerts if one["severity"] in LOUD]
    right = [one for one in loud if is_accepted(one, expected)]
    fitting = [one for part in parts if (one := part.get("verdict")) and is_accepted(one, expected)]
    best = (*right, *reversed(fitting), {})[0]
    strange = _strange(expected, loud)
    verdict = (*reversed(fitting), parts[-1].get("verdict") or {})[0]
    return Judgment(
        faults=tuple(_faults(expected, right, fitting, strange, parts[-1].get("state", ""))),
        notes=tuple(_notes(record, expected, best)),
        silent=not loud,
        named=tuple(sorted({one["rule"] for one in (*right, *fitting)})),
        false=strange,
        state=parts[-1].get("state", ""),
        verdict=verdict.get("rule", ""),
        message=verdict.get("message", ""),
        alerts=tuple(sorted({one["rule"] for one in loud})),
        latency_s=_latency_s(record, right),
        cause=_cause(best, expected),
    )


def _strange(expected: Expectation, loud: Sequence[Finding]) -> tuple[str, ...]:
    if expected.alert == "no":
        return tuple(sorted({one["rule"] for one in loud}))
    allowed = (one["rule"] in expected.also or is_accepted(one, expected) for one in loud)
    return tuple(sorted({one["rule"] for one, is_allowed in zip(loud, allowed, strict=True) if not is_allowed}))


def _faults(
    expected: Expectation, right: Sequence[Finding], fitting: Sequence[Finding], strange: Sequence[str], state: str
) -> Iterator[str]:
    if not state:
        yield "no such run"
    if not fitting and not right:
        yield "not found"
    if expected.alert == "yes" and not right:
        yield "no alert of it"
    if strange:
        yield f"false alarm: {', '.join(strange)}"
    if expected.state and state not in expected.state:
        yield f"state {state or 'unknown'}, not {' or '.join(expected.state)}"


def _notes(record: Mapping[str, Any], expected: Expectation, best: Finding) -> Iterator[str]:
    if record["cut"]:
        yield f"ended by us after {record['wall_s']:.0f} s in step {record['live'].get('step')}"
    if expected.ranks and best and tuple(best.get("ranks") or ()) != expected.ranks:
        yield f"ranks {best.get('ranks')}, not {[*expected.ranks]}"
    if record["left_behind"]:
        yield f"processes left behind: {record['left_behind']}"


def _latency_s(record: Mapping[str, Any], right: Sequence[Finding]) -> float | None:
    onset = next((truth["onset"] for truth in record["truths"] if "onset" in truth), None)
    first = min((one["first_seen"] for one in right), default=None)
    return None if first is None or onset is None else round(max(0.0, first - onset), 1)


def _cause(best: Finding, expected: Expectation) -> str:
    if not (best and expected.names):
        return ""
    words = f"{best.get('message') or ''} {best.get('fix') or ''}"
    if re.search(expected.names, words, re.IGNORECASE):
        return "named"
    evidence = f"{words} {json.dumps(best.get('evidence') or {})}"
    return "only in the evidence" if re.search(expected.names, evidence, re.IGNORECASE) else "not named"
