"""Each fault of the demo in its short form: the real training job is recorded, and the recording is judged with the
rules of the server. The demo as a whole, with its server, is in test_demo.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import job_environment

from perfagent_client.history import find_runs
from perfagent_server.backtest.replay import Judged, replay
from perfagent_server.diagnosis.moments import moments
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan
from perfagent_tools.demo import faults

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # some faults are in test_demo.py
FAULTS = {  # fault: (steps, most steps from its beginning to its alert)
    "wrong-optimizer": (100, 100), "checkpoint-stall": (100, 90), "hidden-work": (60, 60), "frozen": (300, 110),
    "data-repeats": (100, 100), "eval-stall": (100, 90), "nan": (40, 1), "spike": (400, 15), "divergence": (600, 250),
    "grad-explosion": (500, 30), "scale-collapse": (120, 60), "rate-jump": (300, 60), "vanishing": (200, 200),
    "overfit": (800, 800), "throughput-drop": (600, 40), "data-stall": (60, 45), "unchanged-tensor": (300, 200),
    "dead-units": (200, 100), "data-bug": (200, 200), "padding": (300, 300),
}  # fmt: skip


def record(folder: Path, fault: str, steps: int) -> Judged:
    """Trains the demo's job with that fault, and judges what it recorded."""
    job = [sys.executable, "-m", "perfagent_tools.demo.job", "--steps", str(steps), "--fault", fault]
    environment = job_environment(folder, PERFAGENT_RECORD=str(folder / "recorded"), PERFAGENT_RUN_ID="demo")
    done = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    plan = Plan(all_rules())
    [run] = [run for source in find_runs([folder / "recorded"]) for run in source.read()]
    judged = replay(moments(run, plan), plan)
    assert judged.failed == {}
    return judged


@pytest.mark.parametrize(("fault", "case"), FAULTS.items())
def test_a_fault_is_named_in_time_and_nothing_else_is(tmp_path: Path, fault: str, case: tuple[int, int]) -> None:
    steps, within = case
    judged = record(tmp_path, fault, steps)
    wanted = faults.named(fault)
    assert judged.verdict.rule in wanted.expects, judged.verdict.message
    assert judged.verdict.evidence and judged.verdict.fix
    first = next(alert for alert in judged.alerts if alert.rule in wanted.expects)
    assert first.first_step <= wanted.begins(steps) + within


def test_a_drop_is_named_where_other_programs_fill_the_cores(tmp_path: Path) -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        judged = record(tmp_path, "throughput-drop", 300)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert judged.verdict.rule == "throughput_regression", judged.verdict.message


def test_two_thousand_healthy_steps_stay_silent(tmp_path: Path) -> None:
    judged = record(tmp_path, "none", 2000)
    assert [alert for alert in judged.alerts if alert.severity != "info"] == []
    assert judged.verdict.rule == "healthy", judged.verdict.message
