"""What a server shows as the gradient norm of a sharded job is the norm that a single process finds on the joined
batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from agent.frameworks.matrix import ROWS
from agent.frameworks.recordings import recorded
from agent.frameworks.training import trained
from builders import ServerProcess, job_environment

SHARDED = {"FSDP2", "ZeRO-3, clipping"}


@pytest.mark.long  # what the parts of the ranks add up to is in test_sharding.py
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name in SHARDED], ids=lambda row: row.name.partition(",")[0]
)
def test_the_runs_norm_is_that_of_a_single_process(row, server: ServerProcess, tmp_path: Path) -> None:
    training = trained(row)
    steps, run = training.told[0]["watched"]["steps"], recorded(training.record)[0].run
    sent = subprocess.run(
        [sys.executable, "-m", "perfagent", "sync", str(training.record)],
        env=job_environment(tmp_path, PERFAGENT_SERVER=server.url),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert sent.returncode == 0, sent.stdout + sent.stderr
    shown = server.get(f"/runs/{run}/series", name="grad/norm", rank="all")
    assert shown["step"] == list(range(1, len(steps) + 1))
    assert shown["mean"] == pytest.approx([step["norm"] for step in steps], rel=1e-5)
    assert server.get(f"/runs/{run}/latest")["grad/norm"]["value"] == pytest.approx(steps[-1]["norm"], rel=1e-5)
