"""scripts/gpu_check where there is no GPU: it says so, and its own code runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.report import compared

CHECKS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


def check(*arguments: str, folder: Path, timeout_s: float = 170.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(CHECKS / "check.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.real
def test_without_a_gpu_nothing_is_checked_and_folders_are_kept(tmp_path: Path) -> None:
    done = check(folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no NVIDIA GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").write_text("years of work", "utf-8")
    done = check("--dry-run-cpu", "--out", str(tmp_path), folder=tmp_path)
    assert done.returncode == 2
    assert "holds something else" in done.stderr
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_group_runs_dry(tmp_path: Path) -> None:
    done = check("--dry-run-cpu", "--out", "out", folder=tmp_path, timeout_s=850.0)
    assert done.returncode == 0, done.stdout
    assert "nothing about a GPU" in done.stdout
    told = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    status = {one["check"]: one["status"] for one in told["results"]}
    for passes in (
        "losses of 60 steps with and without the agent",
        "floating-point operations of a step",
        "... optimizer state",
        "losses with checkpoint_activations('all')",
        "... nan",
        "... whole_numbers",
        "diagnosis of a job that is ill: copies",
    ):
        assert status[passes] == "pass"
    assert status["forward by events"] == "not checked"


def test_figures_agree_within_a_share_or_a_span() -> None:
    cases = (
        (104.0, 100.0, 0.0, "pass"),
        (106.0, 100.0, 0.0, "FAIL"),
        (3.0, 1.0, 2.5, "pass"),
        (math.nan, 1.0, 2.5, "FAIL"),
    )
    for measured, expected, within, status in cases:
        assert compared("power", measured, expected, unit="W", share=0.05, within=within).status == status
