"""A training that is ended from afar: by a rule, by `perfagent stop`, in a real job of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders import ServerProcess, free_port, job_environment, until
from e2e.launching import JOBS
from preloaded import run

import perfagent

pytestmark = pytest.mark.real
TESTS = str(Path(__file__).resolve().parents[1])


def ranks(server: ServerProcess, folder: Path, way: str) -> list[dict[str, Any]]:
    """What both ranks wrote down."""
    path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    common = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": path,
        "PERFAGENT_SERVER": server.url, "PERFAGENT_RUN_ID": "job",
    }  # fmt: skip
    environments = [job_environment(folder / rank, RANK=rank, LOCAL_RANK=rank, **common) for rank in ("0", "1")]
    ended = run([str(JOBS / "stopped.py"), str(folder), way], folder, environments)
    assert [one.returncode for one in ended] == [0, 0], ended
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


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
