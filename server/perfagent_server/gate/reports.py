"""Writes a judgment of the gate in the formats of CI systems: Markdown (a GitHub job summary), JUnit XML and SARIF 2.1.0
(https://docs.oasis-open.org/sarif/sarif/v2.1.0/)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from perfagent.wire import Finding, metric, plain
from perfagent.wire.quantities import duration
from perfagent_server.ci_reports import SARIF_LEVELS, Failure, Result, TestCase, junit, sarif
from perfagent_server.gate.judgment import CANNOT_TELL, FINE, Judgment
from perfagent_server.gate.timing import Difference

__all__ = ["as_json", "as_junit", "as_sarif", "headline", "lines", "markdown"]

_METHOD = {
    True: "The commands ran in turn, in blocks of steps (A B B A); mean of the ratios of these rounds without the tenth "
    "at either end, with a block bootstrap's interval.",
    False: "The runs were not interleaved: what the machine did between them is part of the difference. Median or mean of the "
    "step times, with a block bootstrap's interval.",
}
_OF = {"unqueued": ", without queueing for a processor", "cpu": " of the processors"}
_TITLES = {"wall": "wall time", "unqueued": "wall time without queueing for a processor", "cpu": "processor time"}

_OWN_RULES = {
    "slower": "A step of NEW takes longer than one of BASE, beyond noise.",
    "failed": "The command of NEW failed, and that of BASE did not.",
}


def headline(judgment: Judgment, confidence: float) -> str:
    if judgment.broken:
        return judgment.broken
    if judgment.speed == "unknown":
        return f"Cannot tell whether NEW is slower: {judgment.why}."
    measure = next(one for one in judgment.times if one.what == judgment.by)
    assert measure.value is not None
    what = "a step takes {}" + _OF.get(judgment.by, "")
    percent = 100 * (measure.value - 1)
    edges = f"{100 * confidence:g} % interval {100 * (measure.low - 1):+.1f} to {100 * (measure.high - 1):+.1f} %"
    if judgment.speed == "same":
        return f"NEW is not slower: {what.format(f'{percent:+.1f} %')} ({edges})."
    grown = next((one for one in judgment.phases if one.phase == judgment.phase), None)
    why = ""
    if grown is not None:
        title = metric(f"phase/{grown.phase}_s").title.lower()
        why = f"; {title} grew most, from {duration(grown.base_s)} to {duration(grown.new_s)} a step"
    return f"NEW is slower: {what.format(f'{percent:.1f} % longer')} ({edges}){why}."


def lines(judgment: Judgment, confidence: float) -> Iterator[str]:
    yield headline(judgment, confidence)
    yield from (f"NEW is sicker: [{one.severity}] {one.rule}: {one.message}" for one in judgment.sicker)
    yield from (_measured(one) for one in judgment.times if one.what != judgment.by)
    yield from (f"new, and judged by the interval above: {one.rule}: {one.message}" for one in judgment.slow_rules)
    yield "{} steps of BASE and {} of NEW. ".format(*judgment.steps) + _METHOD[len(judgment.times) > 1]


def _measured(one: Difference) -> str:
    if one.value is None:
        return f"{_TITLES[one.what]} a step: not measured"
    value, low, high = (f"{100 * (factor - 1):+.1f}" for factor in (one.value, one.low, one.high))
    return f"{_TITLES[one.what]} a step: {value} % ({low} to {high} %)"


def as_json(judgment: Judgment) -> dict[str, Any]:
    made: dict[str, Any] = plain({**asdict(judgment), "exit_code": judgment.exit_code})
    return made


def markdown(judgment: Judgment, confidence: float) -> str:
    word = {FINE: "passed", CANNOT_TELL: "cannot tell"}.get(judgment.exit_code, "failed")
    rows = [f"## perfagent gate: {word}", "", *(f"- {_escaped(line)}" for line in lines(judgment, confidence))]
    if judgment.phases:
        rows += ["", "| part of the step | BASE | NEW |", "|---|---:|---:|"]
        rows += [
            f"| {metric(f'phase/{one.phase}_s').title} | {duration(one.base_s)} | {duration(one.new_s)} |"
            for one in judgment.phases
        ]
    return "\n".join([*rows, ""])


def _escaped(text: str) -> str:
    """What a message quotes of a script is no markup."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#!" else letter for letter in " ".join(text.split()))


def as_junit(judgment: Judgment, confidence: float) -> str:
    """A test for the speed and one for the health. The speed test is skipped if the gate cannot tell."""
    told = headline(judgment, confidence)
    unknown = judgment.base_broken or (judgment.speed == "unknown" and not judgment.broken)
    slower = [Failure(told)] if judgment.speed == "slower" and not unknown else []
    broken = [Failure(judgment.broken)] if judgment.broken and not judgment.base_broken else []
    sicker = [Failure(f"{one.rule}: {one.message}") for one in judgment.sicker]
    speed = TestCase("speed", "perfagent.gate", slower, told if unknown else "")
    return junit("perfagent gate", [speed, TestCase("health", "perfagent.gate", [*broken, *sicker])])


def as_sarif(judgment: Judgment, confidence: float, place: str) -> str:
    """place: the file, folder, script or name of NEW."""
    found = [
        Result(one.rule, SARIF_LEVELS[one.severity], one.message, place, properties=_properties(one))
        for one in judgment.sicker
    ]
    if judgment.speed == "slower":
        found.append(Result("slower", "error", headline(judgment, confidence), place))
    if judgment.broken and not judgment.base_broken:
        found.append(Result("failed", "error", judgment.broken, place))
    return sarif("perfagent gate", found, _OWN_RULES)


def _properties(finding: Finding) -> dict[str, Any]:
    return {"cause": finding.cause, "since_step": finding.since_step, "fix": finding.fix}
