"""Starts training jobs as processes, with and without perfagent, and reads what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from builders import ServerProcess, job_environment

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"
JOBS = Path(__file__).parent / "jobs"


def python(*arguments: str, folder: Path, timeout_s: float = 150.0, **environment: str) -> str:
    """Standard output of a Python process; fails the test with its output when it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=job_environment(folder, **environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (
        f"{arguments} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def monitored(server: ServerProcess, run: str, script: Path, *arguments: str, folder: Path, **environment: str) -> str:
    """Standard output of `perfagent run script`."""
    environment |= {"PERFAGENT_SERVER": server.url, "PERFAGENT_RUN_ID": run}
    return python("-m", "perfagent", "run", str(script), *arguments, folder=folder, **environment)


def printed_losses(output: str) -> list[float]:
    """The training losses in a script's output, in the order of its steps."""
    return [float(value) for value in re.findall(r"^(?:iter|step) \d+: loss (\S+)", output, re.MULTILINE)]


def values(server: ServerProcess, run: str, name: str) -> dict[int, float]:
    """step -> value of one series of rank 0, every sample."""
    return {row["step"]: float(row["value"]) for row in server.export(run) if row["name"] == name and row["rank"] == 0}
