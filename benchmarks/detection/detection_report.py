"""docs/evidence/detection.md and the measured figures of the rules, from what was measured."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_jobs
from injected import FAULTS
from records import chosen_on
from sick import by_rule
from sick import results as sick_results
from sick.batches import all_programs
from tables import replace, table

from perfagent.wire.quantities import some
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.handbook import MEASURED, seen_in_demo
from perfagent_server.rules.rule import Rule
from perfagent_tools.demo import faults as demo_faults

__all__ = ["plain", "sections", "summaries", "targets", "write"]

Results = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence" / "detection.md"
KEPT = ROOT / "benchmarks" / "results"
"""Where the results of the demo and of the sick programs lie."""
DEMO_FAULTS = "demo_faults.json"
_MOST_PER_100K = 1.0
_RECORDED = "faults put into recorded runs"


@dataclass(slots=True)
class Summary:
    """What was measured of a rule. steps: of healthy runs that log what it needs; alerts: in them; early: alerts before
    faults; tested_steps, tested_false: those of them on data on which no threshold of the rule was chosen; latencies: of
    the faults that were found."""

    rule: Rule
    steps: int = 0
    alerts: int = 0
    early: int = 0
    tested_steps: int = 0
    tested_false: int = 0
    found: int = 0
    total: int = 0
    latencies: list[int] = field(default_factory=list)
    on: list[str] = field(default_factory=list)

    @property
    def raised(self) -> int:
        return self.found + self.false

    @property
    def precision(self) -> float | None:
        return self.found / self.raised if self.raised else None

    @property
    def false(self) -> int:
        return self.alerts + self.early

    @property
    def recall(self) -> float | None:
        return self.found / self.total if self.total else None


# ---- figures


def summaries(results: Results) -> dict[str, Summary]:
    """By rule, in the order of the catalogue; of rules with labeled data."""
    found: dict[str, Summary] = {}
    for rule in all_rules():
        summary = Summary(rule)
        faults = [one for one in results["faults"] if one["rule"] == rule.id]
        needs = {name for one in faults for name in one["needs"]}
        for one in faults:
            summary.found += one["found"]
            summary.total += one["total"]
            summary.early += one["early"]
            summary.tested_false += 0 if one["chosen"] else one["early"]
            summary.latencies += one["latencies"]
        if faults:
            summary.on.append(_RECORDED)
            # The curves with a scaler are some of the curves again: they count for the scaler only.
            for run in results["healthy"]:
                if needs <= {*run["series"]} and (run["kind"] == "scaled") == ("amp/scale" in needs):
                    alerts, is_tested = len(_counted(rule, run["alerts"])), not chosen_on(rule.id, run["family"])
                    summary.steps += run["steps"]
                    summary.alerts += alerts
                    summary.tested_steps += run["steps"] if is_tested else 0
                    summary.tested_false += alerts if is_tested else 0
        _add_incidents(summary, results)
        _add_traces(summary, results)
        _add_gpu_jobs(summary, results)
        if summary.on:
            found[rule.id] = summary
    return found


def _add_incidents(summary: Summary, results: Results) -> None:
    """The same incident with other noise before it is one fault: it was found when it was with each. Incidents and traces
    are targets that the rules were built to reach, so nothing in them counts as tested only."""
    for incident in results["incidents"]:
        for seen in incident["seen"]:
            if seen["rule"] == summary.rule.id:
                summary.total += 1
                summary.found += seen["in_time"] == len(seen["fired"])
                summary.early += seen["early"]
                summary.on.append("a real incident")


def _add_traces(summary: Summary, results: Results) -> None:
    rule = summary.rule
    if not any(rule.id in trace["rules"] for trace in results["traces"]):
        return
    for trace in results["traces"]:
        alerts = _counted(rule, trace["alerts"])
        if rule.id in trace["rules"]:
            right = bool(alerts) and (rule.id != "straggler" or [*alerts[0]["ranks"]] == trace["slow"])
            summary.total += 1
            summary.found += right
            summary.early += bool(alerts) and not right
            summary.latencies += [alerts[0]["first_step"]] if right else []
        else:
            summary.steps += trace["steps"]
            summary.alerts += len(alerts)
    summary.on.append("traces of real jobs")


def _add_gpu_jobs(summary: Summary, results: Results) -> None:
    """A remark counts as well: of rules whose remark is all that such a job deserves."""
    rule = summary.rule.id
    if not any(rule in job["rules"] for job in results["gpu_jobs"]):
        return
    for job in results["gpu_jobs"]:
        alerts = [one for one in job["alerts"] if one["rule"] == rule]
        if rule in job["rules"]:
            summary.total += 1
            summary.found += bool(alerts)
            summary.latencies += [one["first_step"] for one in alerts[:1]]
        elif not job["rules"]:
            summary.steps += job["steps"]
            summary.tested_steps += job["steps"]
            summary.alerts += len(alerts)
            summary.tested_false += len(alerts)
    summary.on.append(f"jobs on {gpu_jobs.ON}")


def _counted(rule: Rule, alerts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The alerts of a rule at warning or above; of one that has only remarks, those."""
    only_info = rule.severities == ("info",)
    return [one for one in alerts if one["rule"] == rule.id and (only_info or one["severity"] != "info")]


# ---- documents


def write(results: Results) -> None:
    """docs/evidence/detection.md, and the figures of each rule for docs/reference/rules.md."""
    for section, text in sections(results).items():
        replace(section, text, PAGE)
    MEASURED.write_text(json.dumps(plain(summaries(results)), indent=1) + "\n", "utf-8")


def plain(found: dict[str, Summary], kept: Path = KEPT) -> dict[str, Any]:
    """As the handbook of the rules reads it."""
    figures: dict[str, Any] = {
        rule: {
            "healthy_steps": one.steps, "tested_steps": one.tested_steps, "false_alerts": one.false, "found": one.found,
            "total": one.total, "median_steps": _median(one.latencies), "most_steps": max(one.latencies, default=None),
        }
        for rule, one in found.items()
    }  # fmt: skip
    for rule, named in _named_in_demo(kept / DEMO_FAULTS).items():
        figures.setdefault(rule, {})["demo"] = named
    for rule, of in _of_programs(kept).items():
        figures.setdefault(rule, {})["programs"] = dataclasses.asdict(of)
    return figures


def _of_programs(kept: Path) -> dict[str, by_rule.OfPrograms]:
    return by_rule.by_rule(all_programs(), sick_results.read(kept / sick_results.RESULTS.name))


def _named_in_demo(file: Path) -> dict[str, dict[str, Any]]:
    """By rule: the fault of the demo that it named, and how long that took. Of several faults, the first."""
    runs: list[dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.exists() else []
    return {
        run["alert"]: {"fault": run["fault"], "steps": run["steps_to_alert"], "seconds": run["seconds_to_alert"]}
        for run in reversed(runs)
        if run["alert"] and run["verdict"] in _expected(run["fault"])
    }


def sections(results: Results, kept: Path = KEPT) -> dict[str, str]:
    """What stands between the marks of docs/evidence/detection.md."""
    return {
        "targets": f"Measured on {results['day']}.\n\n{table(('target', 'measured', 'met'), targets(results))}",
        "rules": _rules(results, kept),
        "healthy": _healthy(results),
        "faults": _faults(results),
        "incidents": _incidents(results),
        "traces": _traces(results),
        "gpu": _gpu_jobs(results),
        "demo": _demo(kept / DEMO_FAULTS),
    }


def _rules(results: Results, kept: Path) -> str:
    found, demo = summaries(results), _named_in_demo(kept / DEMO_FAULTS)
    on_healthy = Counter(
        rule.id for rule in all_rules() for run in results["healthy"] for _ in _counted(rule, run["alerts"])
    )
    of_programs = _of_programs(kept)
    rows = []
    for rule in all_rules():
        one = found.get(rule.id)
        named = f"; {seen_in_demo(demo[rule.id])}" if rule.id in demo else ""
        programs = _programs(of_programs.get(rule.id))
        if one is not None:
            chosen = f"{one.steps - one.tested_steps:,}", str(one.false - one.tested_false)
            figures = *chosen, f"{one.tested_steps:,}", str(one.tested_false), _precision(one), _of(one)
            measured_on = ", ".join(dict.fromkeys(one.on)) + named
            rows.append((f"`{rule.id}`", *figures, _steps(one.latencies), *programs, measured_on))
        else:
            words = "not yet seen on a card" if rule.needs_card else "no recorded runs: tested on synthetic series"
            words = "sick programs" if any(programs) else words
            rows.append(
                (f"`{rule.id}`", "", "", "", str(on_healthy[rule.id] or ""), "", "", "", *programs, words + named)
            )
    head = (
        "rule", "healthy steps, chosen", "false alerts, chosen", "healthy steps, tested", "false alerts, tested",
        "precision", "recall", "steps", "programs named", "false alarms in programs", "measured on",
    )  # fmt: skip
    return f"{_how_much_is_tested(results, found)}\n\n{table(head, rows)}"


def _programs(one: by_rule.OfPrograms | None) -> tuple[str, str]:
    if one is None:
        return "", ""
    return f"{one.named} of {one.should}" if one.should else "", str(one.false or "")


def _how_much_is_tested(results: Results, found: dict[str, Summary]) -> str:
    """What the shares of the rules stand on."""
    runs = [run for run in results["healthy"] if run["kind"] != "scaled"]
    steps = sum(run["steps"] for run in runs)
    chosen = [one.tested_steps for one in found.values() if one.steps > one.tested_steps and _RECORDED in one.on]
    told = f"Read a share with its numbers: 1.000 (1/1) is one fault. The healthy runs have {steps:,} steps together."
    if not chosen:
        return told
    return (
        f"{told} The thresholds of {some(len(chosen), 'rule')} were chosen with a look at them: for each of these rules, at "
        f"most {some(max(chosen), 'healthy step')} are a true test."
    )


def _healthy(results: Results) -> str:
    # The curves with a scaler are some of the curves again, and so are the alerts in them.
    once = [run for run in results["healthy"] if run["kind"] != "scaled"]
    families: dict[str, list[dict[str, Any]]] = {}
    for run in once:
        families.setdefault(run["family"], []).append(run)
    rules = all_rules()
    rows = [
        (
            family, str(len(runs)), f"{sum(run['steps'] for run in runs):,}",
            ", ".join(sorted({name for run in runs for name in run["series"]})),
            str(sum(len(_counted(rule, run["alerts"])) for run in runs for rule in rules)),
            ", ".join(f"`{rule}`" for rule in _chosen_on(family, runs)) or "none",
        )
        for family, runs in families.items()
    ]  # fmt: skip
    text = table(("family", "runs", "steps", "series", "alerts", "thresholds chosen on it"), rows)
    told = [
        f"- `{one['rule']}` ({one['severity']}) in step {one['first_step']:,} of {run['run']}: {one['message']}\n"
        for run in once
        for one in run["alerts"]
    ]
    said = f"Every alert and remark in them:\n\n{''.join(told)}" if told else "No rule said anything in them."
    return f"{text}\n\n{said}"


def _chosen_on(family: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """The rules whose thresholds were chosen with a look at these runs."""
    series = {name for run in runs for name in run["series"]}
    needs: dict[str, set[str]] = {}
    for fault in FAULTS:
        needs.setdefault(fault.rule, set()).update(fault.needs)
    return [rule.id for rule in all_rules() if chosen_on(rule.id, family) and needs.get(rule.id, set()) <= series]


def _faults(results: Results) -> str:
    rows = [
        (
            one["fault"], f"`{one['rule']}`", "chosen" if one["chosen"] else "tested", f"{one['found']}/{one['total']}",
            _share(one["found"] / one["total"]), f"{one['within']}", _steps(one["latencies"]), str(one["early"]),
        )
        for one in results["faults"]
    ]  # fmt: skip
    return table(("fault", "rule", "families", "found", "recall", "within", "steps", "alerts before it"), rows)


def _incidents(results: Results) -> str:
    rows = [
        (
            incident["incident"], f"`{seen['rule']}`", f"{incident['began']:,}", _fired(seen["fired"]),
            f"{seen['in_time_until']:,}", f"{seen['in_time']}/{len(seen['fired'])}", str(seen["early"]),
        )
        for incident in results["incidents"]
        for seen in incident["seen"]
    ]  # fmt: skip
    return table(("incident", "rule", "began", "fired", "in time until", "in time", "alerts before it"), rows)


def _fired(iterations: Sequence[int | None]) -> str:
    counted = Counter("never" if at is None else f"{at:,}" for at in iterations)
    return ", ".join(at if len(counted) == 1 else f"{at} ({count} times)" for at, count in sorted(counted.items()))


def _traces(results: Results) -> str:
    rows = []
    for trace in results["traces"]:
        slow = ", ".join(f"rank {rank}" for rank in trace["slow"]) or "no worker"
        said = "; ".join(f"`{one['rule']}` in step {one['first_step']}: {one['message']}" for one in trace["alerts"])
        told = str(trace["ranks"]), str(trace["stages"]), str(trace["steps"])
        rows.append((trace["trace"], *told, slow, said or "nothing"))
    return table(("trace", "ranks", "stages", "steps", "slowed", "what the rules said"), rows)


def _gpu_jobs(results: Results) -> str:
    rows = []
    for job in results["gpu_jobs"]:
        said = "; ".join(
            f"`{one['rule']}` ({one['severity']}) in step {one['first_step']:,}: {one['message']}"
            for one in job["alerts"]
        )
        ill = ", ".join(f"`{rule}`" for rule in job["rules"]) or "nothing"
        rows.append((job["job"], f"{job['steps']:,}", ill, said or "nothing"))
    return table(("job", "steps", "ill of", "what the rules said"), rows)


def _demo(file: Path) -> str:
    if not file.exists():
        return "Not measured yet."
    found: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
    right = [one["verdict"] in _expected(one["fault"]) for one in found]
    rows = [
        (
            one["fault"], f"`{one['verdict']}`" if is_right else f"**`{one['verdict']}`**",
            f"`{one['alert']}`" if one["alert"] else "", _number(one["steps_to_alert"]), _number(one["seconds_to_alert"]),
        )
        for one, is_right in zip(found, right, strict=True)
    ]  # fmt: skip
    head = "fault", "verdict", "alert", "steps to it", "seconds to it"
    return f"{sum(right)} of {len(found)} runs ended in the right verdict; wrong ones are bold.\n\n{table(head, rows)}"


def _expected(fault: str) -> tuple[str, ...]:
    """What the verdict on a fault of the demo may be."""
    return demo_faults.named(fault).expects


# ---- targets


def targets(results: Results) -> list[tuple[str, str, str]]:
    rules = {rule.id for rule in all_rules()}
    spikes = [one for one in results["faults"] if one["rule"] == "loss_spike" and "0.5 nat" in one["fault"]]
    slower = [one for one in results["faults"] if one["rule"] == "throughput_regression" and "5.7 %" in one["fault"]]
    bad = [one for one in results["faults"] if one["rule"] == "nonfinite_loss"]
    told = [_false_alarms(results)]
    told += [
        (
            "spikes of 0.5 nat that decay or stay: recall 0.95 within 10 steps",
            *_recalls("loss_spike", spikes, rules, 0.95),
        ),
        ("NaN within one step, always", *_recalls("nonfinite_loss", bad, rules, 1.0)),
        (
            "steps that take 5.7 % longer: recall 0.95 within 20 steps",
            *_recalls("throughput_regression", slower, rules, 0.95),
        ),
    ]
    bloom = [seen for one in results["incidents"] for seen in one["seen"] if seen["rule"] == "grad_norm_explosion"]
    told.append(("gradient alert at least 3 iterations before the loss on BLOOM-176B", *_in_time(bloom)))
    told += [_straggler(trace) for trace in results["traces"]]
    return told


def _false_alarms(results: Results) -> tuple[str, str, str]:
    """Of each rule, on the healthy runs that log what it needs; of one without labeled data, on all."""
    runs = [run for run in results["healthy"] if run["kind"] != "scaled"]
    steps, found = sum(run["steps"] for run in runs), summaries(results)
    rates: dict[str, float] = {}
    for rule in all_rules():
        alerts = sum(one["rule"] == rule.id and one["severity"] != "info" for run in runs for one in run["alerts"])
        judged = steps
        if rule.id in found and rule.severities != ("info",):
            alerts, judged = found[rule.id].alerts, found[rule.id].steps
        rates[rule.id] = 100_000 * alerts / max(1, judged)
    above = [f"`{rule}` {rate:.2g}" for rule, rate in rates.items() if rate > _MOST_PER_100K]
    words = f"{steps:,} steps; more than one: {', '.join(above) or 'no rule'}"
    return "at most one warning or critical per 100,000 healthy steps for every rule", words, _met(not above)


def _recalls(rule: str, faults: Sequence[dict[str, Any]], rules: set[str], least: float) -> tuple[str, str]:
    if rule not in rules or not faults:
        return "no such rule yet", "not yet"
    shares = [(one["found"] / one["total"], f"{one['found']}/{one['total']}") for one in faults]
    return ", ".join(words for _, words in shares), _met(all(share >= least for share, _ in shares))


def _in_time(seen: Sequence[dict[str, Any]]) -> tuple[str, str]:
    if not seen:
        return "no such rule yet", "not yet"
    one = seen[0]
    fired = [at for at in one["fired"] if at is not None]
    last = f"iteration {max(fired):,} at the latest" if len(fired) == len(one["fired"]) else "not always found"
    return f"{last}; {one['in_time']}/{len(one['fired'])} in time", _met(one["in_time"] == len(one["fired"]))


def _straggler(trace: dict[str, Any]) -> tuple[str, str, str]:
    alerts = [one for one in trace["alerts"] if one["rule"] == "straggler" and one["severity"] != "info"]
    if trace["slow"]:
        right = bool(alerts) and [*alerts[0]["ranks"]] == trace["slow"]
        words = f"named in step {alerts[0]['first_step']}" if right else "not named"
        return f"the slowed worker of trace {trace['trace']} is found", words, _met(right)
    words = "none blamed" if not alerts else f"{len(alerts)} alerts"
    return f"no worker is blamed for trace {trace['trace']}", words, _met(not alerts)


# ---- words


def _met(holds: bool) -> str:
    return "yes" if holds else "no"


def _median(values: Sequence[int]) -> int | None:
    return sorted(values)[len(values) // 2] if values else None


def _steps(latencies: Sequence[int]) -> str:
    return f"{_median(latencies)}, {max(latencies)}" if latencies else ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _precision(one: Summary) -> str:
    return f"{_share(one.precision)} ({one.found}/{one.raised})" if one.raised else ""


def _of(one: Summary) -> str:
    return f"{_share(one.recall)} ({one.found}/{one.total})" if one.total else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}"
