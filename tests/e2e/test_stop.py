"""A training that is ended from afar: by a rule, by `perfagent stop`, in a real job of two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders import ServerProcess, job_environment, until
from e2e.launching import JOBS
from two_ranks import of_two_ranks

import perfagent

pytestmark = pytest.mark.real


def ranks(server: ServerProcess, folder: Path, way: str) -> list[dict[str, Any]]:
    """What both ranks wrote down."""
    place = {"PERFAGENT_SERVER": server.url, "PERFAGENT_RUN_ID": "job"}
    return of_two_ranks(JOBS / "stopped.py", folder, way, **place)


@pytest.mark.parametrize("way", ["plain", "loop"])
def test_a_nan_stops_both_ranks_after_one_step(server: ServerProcess, tmp_path: Path, way: str) -> None:
    server.admin("PUT", "/rules/nonfinite_loss", {"stop": True})
    first, second = ranks(server, tmp_path, way)
    assert first["step"] == second["step"] > 100
    assert max(first["at"], second["at"]) - second["nan"] < 5.0
    assert "rule nonfinite_loss" in first["how"] or way == "loop"
    summary = server.wait_for_state("job", "finished")
    assert f"stopped after step {first['step']}: rule nonfinite_loss" in summary["reason"]
    [order] = server.get("/runs/job/commands")["commands"][-1:]
    assert (order["kind"], order["params"]["step"], order["params"]["saves"]) == ("stop", first["step"], False)
    audited = server.admin("GET", "/audit?action=run.command")["entries"]
    assert [one["who"] for one in audited] == ["rule nonfinite_loss"]
    if way == "loop":
        step, state = perfagent.Checkpoint(tmp_path / "checkpoints").load_latest() or (0, {})
        assert step == 80, "the newest without a NaN"
        assert all(bool(value.isfinite().all()) for value in state["model"].values())


def has_trained(server: ServerProcess, step: int) -> None:
    until(lambda: (found := server.find("/runs/job")) is not None and found["step"] >= step, within_s=60)


def perfagent_stop(server: ServerProcess, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perfagent", "stop", "job", "--server", server.url, "--json"]
    environment = job_environment(folder / "person") | {"PERFAGENT_API_KEY": server.admin_token}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_perfagent_stop_ends_a_loop_that_reads_it(server: ServerProcess, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as aside:
        job = aside.submit(ranks, server, tmp_path, "reads")
        has_trained(server, 20)
        said = perfagent_stop(server, tmp_path)
        first, second = job.result()
    assert said.returncode == 0, said.stderr
    assert first["step"] == second["step"] == json.loads(said.stdout)["step"]
    assert first["how"] == second["how"] == "by should_stop"
