"""Writes diagnoses as JSON (fields: docs/guides/diagnose.md), as SARIF for code hosts, as JUnit for CI, and for an import."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from perfagent.wire import Finding, plain
from perfagent_client.history.old_run import OldRun, Samples
from perfagent_server.backtest.replay import BacktestAlert
from perfagent_server.ci_reports import SARIF_LEVELS, Failure, Result, TestCase, junit, sarif
from perfagent_server.diagnosis.judging import Diagnosis

__all__ = ["as_findings", "as_json", "as_junit", "as_sarif", "worth_telling"]


def as_json(diagnoses: Iterable[Diagnosis]) -> dict[str, Any]:
    return {"version": 1, "runs": [_run(one) for one in diagnoses]}


def _run(one: Diagnosis) -> dict[str, Any]:
    return {
        "name": one.name,
        "path": one.path,
        "format": one.format,
        "source": one.source,
        "steps": one.steps,
        "outcome": one.outcome,
        "verdict": {
            **_words(one.verdict),
            "since_step": one.verdict.since_step,
            "evidence": plain(one.verdict.evidence),
        },
        "findings": [_alert(alert) for alert in one.alerts],
        "not_judged": one.unjudged,
        "left_out": one.left_out,
    }


def _words(found: Finding) -> dict[str, Any]:
    return {name: getattr(found, name) for name in ("rule", "severity", "cause", "title", "message", "fix")}


def _alert(alert: BacktestAlert) -> dict[str, Any]:
    words = _words(alert.fired) if alert.fired is not None else {"rule": alert.rule}
    steps = {name: getattr(alert, name) for name in ("onset_step", "first_step", "last_step")}
    return {**words, "severity": alert.severity, "message": alert.message, **steps, "ranks": [*alert.ranks]}


def worth_telling(one: Diagnosis) -> list[Finding]:
    """The verdict, and what else was found and is more than a remark, worst first as it came."""
    if one.outcome != "finding":
        return []
    told = [one.verdict] if one.verdict.rule != "healthy" else []
    others = [alert.fired for alert in one.alerts if alert.severity != "info" and alert.fired is not None]
    return told + [found for found in others if found.rule != one.verdict.rule]


def as_sarif(diagnoses: Sequence[Diagnosis]) -> str:
    """A result per finding, at the file of the run."""
    found = [
        Result(
            finding.rule,
            SARIF_LEVELS[finding.severity],
            f"{one.name}: {finding.message}" + (f" Fix: {finding.fix}" if finding.fix else ""),
            one.path or one.name,
            one.name,
            {"run": one.name, "cause": finding.cause, "since_step": finding.since_step},
        )
        for one in diagnoses
        for finding in worth_telling(one)
    ]
    return sarif("perfagent", found)


def as_junit(diagnoses: Sequence[Diagnosis]) -> str:
    """A test case per run: a finding fails it, and a run that could not be judged is skipped."""
    return junit("perfagent diagnose", [_case(one) for one in diagnoses])


def _case(one: Diagnosis) -> TestCase:
    place = one.path or "run"
    if told := worth_telling(one):
        text = "\n\n".join(f"{found.rule} ({found.severity}): {found.message}\nFix: {found.fix}" for found in told)
        return TestCase(one.name, place, [Failure(told[0].title, told[0].rule, text)])
    skipped = ("; ".join(one.left_out) or "too little data") if one.outcome == "could not judge" else ""
    return TestCase(one.name, place, skipped=skipped)


def as_findings(one: Diagnosis, run: OldRun, written: float) -> list[dict[str, Any]]:
    """As `findings` of an `import` event. written: when, where the files of the run know no times."""
    known = [samples for samples in run.series.values() if len(samples)]
    leading = max(known, key=len, default=Samples())
    return [
        _found(alert, alert.fired, partial(_time, leading, written)) for alert in one.alerts if alert.fired is not None
    ]


def _found(alert: BacktestAlert, fired: Finding, time_of: Callable[[int], float]) -> dict[str, Any]:
    return {
        **_words(fired), "severity": alert.severity, "message": alert.message, "cost": fired.cost, "evidence": fired.evidence,
        "gain_pct": fired.gain_pct, "ranks": [*alert.ranks], "since_step": alert.onset_step, "last_step": alert.last_step,
        "time": time_of(alert.onset_step), "ended": time_of(alert.last_step), "to_the_end": alert.to_the_end,
    }  # fmt: skip


def _time(samples: Samples, written: float, step: int) -> float:
    """Of the last row up to a step."""
    at = next((at for at in range(len(samples) - 1, -1, -1) if samples.step[at] <= step), 0)
    found = samples.time[at] if len(samples) else math.nan
    return found if math.isfinite(found) else written
