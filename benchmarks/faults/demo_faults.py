"""The faults of the demo in their full form: `perfagent demo --fault NAME` as a newcomer types it, at a real server.

The server is asked over HTTP, as people ask it: what the verdict is, which alert named the fault, with what evidence,
and how long that took from the step in which the fault began. Short forms are in tests/e2e/test_demo_faults.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders import ServerProcess, job_environment, server_process
from faults.outcome import Outcome
from websockets.sync.client import connect

from perfagent_server.rules.catalogue import all_rules
from perfagent_tools.demo.faults import FAULTS, Fault, named

__all__ = ["FAULTS", "demo_faults"]

KEPT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "demo_faults.json"
QUICK = ("none", "nan", "data-stall", "exception")
HEALTHY_STEPS, QUICK_STEPS = 2000, 100
_REMARKS = {rule.id for rule in all_rules() if rule.severities == ("info",)}
_WITHIN_S = 900.0  # the longest fault takes five minutes on a machine that does nothing else

Fired = tuple[dict[str, Any], float]
"""An alert as it was when it fired, and when its news came, Unix seconds."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the server said of one run. The first five fields are what benchmarks/results/demo_faults.json keeps;
    wrong: what is not as it should be, in words; beside: other rules with an alert at warning or above."""

    fault: str
    verdict: str
    alert: str | None
    steps_to_alert: int | None
    seconds_to_alert: float | None
    wrong: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def kept(self) -> dict[str, Any]:
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in ("wrong", "beside")}


def demo_faults(folder: Path, names: Iterable[str] = (), *, quick: bool) -> list[Outcome]:
    """Runs the demo once with each of these faults (all without a name), and keeps what came of it beside what is known
    of the others. quick: few steps, without a name few faults; nothing is kept."""
    seen = []
    for name in names or (QUICK if quick else FAULTS):
        one = ordered(folder / name, named(name), quick=quick)
        seen.append(one)
        print(f"  {_words(one)}", flush=True)
        if not quick:
            keep(one)
    wrong = {one.fault: one.wrong for one in seen if one.wrong}
    return outcomes([one.kept() for one in seen] if quick else read(), wrong, QUICK_STEPS if quick else HEALTHY_STEPS)


def outcomes(kept: Sequence[dict[str, Any]], wrong: Mapping[str, Sequence[str]], healthy_steps: int) -> list[Outcome]:
    """wrong: what is not as it should be in the runs of now, by fault."""

    def is_right(one: dict[str, Any]) -> bool:
        alert = one["alert"] is None if one["fault"] == "none" else one["alert"] in named(one["fault"]).expects
        return alert and one["verdict"] in named(one["fault"]).expects and one["fault"] not in wrong

    sick, healthy = ([one for one in kept if (one["fault"] == "none") is none] for none in (False, True))
    found = []
    if sick:
        right = [one for one in sick if is_right(one)]
        missed = [f"{one['fault']} ({one['verdict']})" for one in sick if one not in right]
        latest = max(right, key=lambda one: float(one["seconds_to_alert"]), default=None)
        figures = [f"the latest alert {latest['seconds_to_alert']:.0f} s after its fault began"] if latest else []
        figures += [f"not right: {', '.join(missed)}"] if missed else []
        name = "every fault of the demo is named by the verdict, and by an alert with evidence"
        found.append(Outcome("D01", name, len(right), len(sick), "; ".join(figures)))
    if healthy:
        name = "the healthy demo raises no alert and is judged healthy"
        found.append(Outcome("D01", name, sum(map(is_right, healthy)), len(healthy), f"{healthy_steps:,} steps"))
    return found


# ---- one run


def ordered(folder: Path, fault: Fault, *, quick: bool) -> Seen:
    """The demo with that fault at a server of its own, watched from outside until it has ended."""
    steps = _steps(fault, quick=quick)
    command = [sys.executable, "-m", "perfagent", "demo", "--fault", fault.name, "--exit"]
    command += [] if steps is None else ["--steps", f"{steps}"]
    with server_process(folder / "server") as server, (folder / "said").open("w+") as said:
        environment = job_environment(folder, PERFAGENT_SERVER=server.url)
        demo = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            fired = watch(server, demo, fault)
        finally:
            demo.kill()
            code = demo.wait()
        [run] = [one["run"] for one in server.get("/runs")["runs"]]
        verdict, alerts = server.get(f"/runs/{run}/verdict"), server.get(f"/runs/{run}/alerts")["alerts"]
        times = _times(server.export(run))
    text = (folder / "said").read_text("utf-8", "replace")
    wrong = [] if code == 0 else [f"the demo ended with {code}: {text[-600:]}"]
    return _judged(fault, _trained(text), verdict, alerts, fired, times, wrong)


def _steps(fault: Fault, *, quick: bool) -> int | None:
    """What is asked for; None for the demo's own default."""
    if fault.name == "none":
        return QUICK_STEPS if quick else HEALTHY_STEPS
    return fault.min_steps if quick else None


def watch(server: ServerProcess, demo: subprocess.Popen[bytes], fault: Fault) -> Fired | None:
    """The first alert that names the fault; waits until the demo has ended. Listens as the page of all runs does, which
    sees each change of an alert: its row says soon at which step it was resolved, no longer at which it fired."""
    fired: Fired | None = None
    end = time.monotonic() + _WITHIN_S
    with connect(f"ws://127.0.0.1:{server.port}/ws/live", max_size=None) as page:
        page.send(json.dumps({"subscribe": {"fleet": True, "names": ["loss"]}}))
        while demo.poll() is None and time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                alert = json.loads(page.recv(timeout=0.5)).get("alert")
                if fired is None and alert and alert["rule"] in fault.expects and _counts(alert):
                    fired = alert, time.time()
    return fired


def _counts(alert: dict[str, Any]) -> bool:
    """From the severity warning on; of a rule that makes remarks only, its remarks."""
    return alert["severity"] != "info" or alert["rule"] in _REMARKS


def _trained(text: str) -> int:
    """How many steps the demo said that it trains."""
    match = re.search(r"for (\d+) steps; fault:", text)
    if match is None:
        raise AssertionError(f"the demo did not say what it trains: {text[-600:]}")
    return int(match[1])


def _times(rows: Iterable[dict[str, Any]]) -> dict[int, float]:
    """When the first sample of each step was taken, Unix seconds."""
    times: dict[int, float] = {}
    for row in rows:
        if row["step"] is not None:
            times[row["step"]] = min(times.get(row["step"], row["time"]), row["time"])
    return times


def _judged(
    fault: Fault,
    steps: int,
    verdict: dict[str, Any],
    alerts: Sequence[dict[str, Any]],
    fired: Fired | None,
    times: dict[int, float],
    wrong: list[str],
) -> Seen:
    loud = [alert for alert in alerts if alert["severity"] != "info"]
    beside = tuple(sorted({alert["rule"] for alert in loud if alert["rule"] not in fault.expects}))
    if verdict["rule"] not in fault.expects:
        wrong.append(f"{fault.name}: the verdict is {verdict['rule']}: {verdict['message']}")
    if fault.name == "none":
        wrong += [f"none: {alert['rule']}: {alert['message']}" for alert in loud]
        return Seen("none", verdict["rule"], loud[-1]["rule"] if loud else None, None, None, (*wrong,))
    wrong += [f"{fault.name}: the verdict has no {part}" for part in ("evidence", "fix") if not verdict.get(part)]
    if fired is None:
        wrong.append(f"{fault.name}: no alert named it")
        return Seen(fault.name, verdict["rule"], None, None, None, (*wrong,), beside)
    alert, seen_at = fired
    if not alert["evidence"]:
        wrong.append(f"{fault.name}: the alert has no evidence")
    begins = fault.begins(steps)
    # The step before it is over when the fault's own begins; that one may never end.
    began_at = times[max((step for step in times if step < begins), default=min(times))]
    steps_to_alert = max(0, (alert["last_step"] or begins) - begins)
    return Seen(
        fault.name, verdict["rule"], alert["rule"], steps_to_alert, round(seen_at - began_at, 2), (*wrong,), beside
    )  # fmt: skip


def _words(one: Seen) -> str:
    named_by = "no alert" if one.alert is None else f"alert {one.alert}"
    if one.seconds_to_alert is not None:
        named_by += f" after {one.steps_to_alert} steps, {one.seconds_to_alert:.1f} s"
    more = f"; also {', '.join(one.beside)}" if one.beside else ""
    return "\n    ".join([f"{one.fault}: {one.verdict}, {named_by}{more}", *one.wrong])


# ---- benchmarks/results/demo_faults.json


def read(file: Path = KEPT) -> list[dict[str, Any]]:
    return json.loads(file.read_text("utf-8")) if file.exists() else []


def keep(one: Seen, file: Path = KEPT) -> None:
    """Puts a result in the place of the last one of its fault."""
    known = {result["fault"]: result for result in read(file)} | {one.fault: one.kept()}
    lines = ",\n".join(f" {json.dumps(known[name])}" for name in FAULTS if name in known)
    file.write_text(f"[\n{lines}\n]\n", "utf-8")
