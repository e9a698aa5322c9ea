"""From a training process to the verdict, over real processes."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from builders import ServerProcess, job_environment, sync, until
from e2e.launching import JOBS, python, values

pytestmark = pytest.mark.real


def test_loader_that_sleeps_is_data_wait_and_the_verdict(server: ServerProcess, tmp_path: Path) -> None:
    variables = {"PERFAGENT_SERVER": server.url, "PERFAGENT_RUN_ID": "slow"}
    output = python(str(JOBS / "slow_loader.py"), "60", folder=tmp_path, **variables)
    sync(job_environment(tmp_path, PERFAGENT_SERVER=server.url))
    server.wait_for_state("slow", "finished")
    own = [float(wait) for wait in re.search(r"^WAITS (.+)", output, re.MULTILINE)[1].split()]
    waits = values(server, "slow", "phase/data_s")
    assert sorted(waits) == list(range(1, 61))
    # Step by step, and of the differences the middle one: where the machine stops this process between the two clocks,
    # for once, neither of them is wrong.
    apart = statistics.median(waits[step] - own[step - 1] for step in range(2, 61))
    assert abs(apart) <= 0.05 * statistics.median(own[1:])

    verdict = until(
        lambda: (one := server.get("/runs/slow/verdict"))["rule"] == "data_bound" and one, why="no data wait"
    )
    assert verdict["evidence"]["share_pct"] > 50
    assert "worker" in verdict["fix"]
