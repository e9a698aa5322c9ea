"""The demo as a user starts it, on a fresh machine: nothing in its folders, any free port."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import job_environment


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perfagent", "demo", "--port", "0", *arguments]
    return subprocess.run(
        command, env=job_environment(folder), capture_output=True, text=True, timeout=170, check=False
    )


@pytest.mark.long
def test_a_short_demo_ends_by_itself_and_is_judged_healthy(tmp_path: Path) -> None:
    done = demo(tmp_path, "--steps", "40", "--exit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/run/demo-none-", done.stdout)
    assert "state:   finished at step 40" in done.stdout
    assert "verdict: healthy" in done.stdout
    assert "verdict at step" not in done.stdout
    assert "loss -" not in done.stdout
    assert "Nothing to judge yet" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith("perfagent up")


@pytest.mark.parametrize(
    ("fault", "rule"), [("nan", "nonfinite_loss"), pytest.param("data-stall", "data_bound", marks=pytest.mark.long)]
)
def test_a_fault_of_the_demo_ends_in_its_verdict(tmp_path: Path, fault: str, rule: str) -> None:
    done = demo(tmp_path, "--steps", "40", "--fault", fault, "--exit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"verdict: {rule} (" in done.stdout
    assert "fix:     " in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "state", "rule"),
    [("exception", "failed", "process_crash"), ("oom", "oom", "oom_observed"), ("killed", "killed", "process_crash")],
)
def test_a_job_that_dies_says_how(tmp_path: Path, fault: str, state: str, rule: str) -> None:
    done = demo(tmp_path, "--steps", "20", "--fault", fault, "--exit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"state:   {state} at step" in done.stdout
    assert f"verdict: {rule} (" in done.stdout


def test_a_fault_that_is_not_there_yet_is_refused_with_those_that_are(tmp_path: Path) -> None:
    done = demo(tmp_path, "--fault", "straggler", "--exit")
    assert done.returncode in (1, 2)
    assert "straggler" in done.stderr
    assert "data-stall" in done.stderr
    assert "Traceback" not in done.stderr
