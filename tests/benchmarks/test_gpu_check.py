"""scripts/gpu_check where there is no GPU: it says so, its own code runs, and what it found is put together."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHECKS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
EMPTY_PAGE = "<!-- results:begin -->\n<!-- results:end -->\n"


def check(*arguments: str, folder: Path, timeout_s: float = 170.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(CHECKS / "check.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)


def status_of(folder: Path) -> dict[str, str]:
    told = json.loads((folder / "results.json").read_text("utf-8"))
    return {one["check"]: one["status"] for one in told["results"]}


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
def test_a_dry_run_records_and_is_no_result_of_a_gpu(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(EMPTY_PAGE, "utf-8")
    done = check("--dry-run-cpu", "--out", "out", "--only", "memory", "--docs", str(page), folder=tmp_path)
    assert done.returncode == 0, done.stdout + (tmp_path / "out" / "memory.log").read_text("utf-8")
    assert "nothing about a GPU" in done.stdout
    assert status_of(tmp_path / "out")["running out of memory: the script's exception"] == "pass"
    assert len([*(tmp_path / "out" / "recorded" / "memory").iterdir()]) == 1, "what `perfagent sync` will send"
    assert page.read_text("utf-8") == EMPTY_PAGE


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_group_runs_dry(tmp_path: Path) -> None:
    done = check("--dry-run-cpu", "--out", "out", folder=tmp_path, timeout_s=850.0)
    assert done.returncode == 0, done.stdout
    status = status_of(tmp_path / "out")
    for passes in (
        "losses of 60 steps with and without the agent",
        "floating-point operations of a step",
        "... optimizer state",
        "losses with checkpoint_activations('all')",
        "diagnosis of a job that is ill: copies",
    ):
        assert status[passes] == "pass"
    assert status["forward by events"] == "not checked"


def call(folder: Path, name: str, *, device: str = "H200") -> str:
    """The results of one call, with a check that passed, as a machine that is lent for ten minutes leaves them."""
    machine = {
        "device": device,
        "date": "2026-01-01",
        "words": f"{device}, torch 2.13",
        "torch": "2.13",
        "commit": "ab",
    }
    passed = {"check": name, "expected": "1", "measured": "a|b", "status": "pass", "note": ""}
    (folder / name).mkdir()
    (folder / name / "results.json").write_text(json.dumps({"machine": machine, "results": [passed]}), "utf-8")
    return str(folder / name)


@pytest.mark.real
def test_several_calls_become_one_section_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"# GPU\n\n{EMPTY_PAGE}after\n", "utf-8")

    def join(*folders: str) -> subprocess.CompletedProcess[str]:
        return check("--out", "all", "--docs", str(page), "--join", *folders, folder=tmp_path)

    first, second, other = call(tmp_path, "first"), call(tmp_path, "second"), call(tmp_path, "other", device="T4")
    for folders in ([first], [other], [first, second]):  # the last takes the place of the first
        assert join(*folders).returncode == 0
    text = page.read_text("utf-8")
    assert text.count("### H200, 2026-01-01") == text.count("### T4, 2026-01-01") == 1
    assert "2 passed, 0 failed" in text
    assert "a\\|b" in text
    assert text.startswith("# GPU\n")
    assert text.endswith("<!-- results:end -->\nafter\n")
    refused = join(first, other)
    assert refused.returncode == 2
    assert "several machines" in refused.stderr


# ---- what is measured


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports one of the checks. They have short names, and none of them stays for other tests."""
    monkeypatch.syspath_prepend(str(CHECKS))
    before = set(sys.modules)
    yield importlib.import_module
    for path in CHECKS.glob("*.py"):
        if path.stem not in before:
            sys.modules.pop(path.stem, None)


def test_figures_agree_within_a_share_or_a_span(module: Any) -> None:
    compared = module("report").compared
    cases = (
        (104.0, 100.0, 0.0, "pass"),
        (106.0, 100.0, 0.0, "FAIL"),
        (3.0, 1.0, 2.5, "pass"),
        (math.nan, 1.0, 2.5, "FAIL"),
    )
    for measured, expected, within, status in cases:
        assert compared("power", measured, expected, unit="W", share=0.05, within=within).status == status


def _launched(correlation: int, at: float, begin: float, *, thread: int = 1) -> list[dict[str, object]]:
    """A kernel of 2 µs as the profiler's trace tells it."""
    both = {"args": {"correlation": correlation}}
    launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": thread, "ts": at, "dur": 1, **both}
    return [launch, {"cat": "kernel", "name": "k", "tid": 7, "ts": begin, "dur": 2, **both}]


def test_a_phase_has_what_any_thread_launched_meanwhile(module: Any) -> None:
    timing = module("timing")
    events = [
        {"cat": "user_annotation", "name": "check backward", "tid": 1, "ts": 100, "dur": 50},
        {"cat": "gpu_user_annotation", "name": "check backward", "tid": 7, "ts": 1000, "dur": 2},
        {"cat": "user_annotation", "name": "check backward", "tid": 1, "ts": 300, "dur": 50},
        *_launched(1, 99, 990),  # forward's last
        *_launched(2, 101, 1000),
        *_launched(3, 149, 1030, thread=2),
        *_launched(4, 310, 1100, thread=2),
        {"cat": "cpu_op", "name": "aten::mm", "tid": 2, "ts": 120, "dur": 3, "args": {"External id": 5}},
    ]
    assert timing.device_spans(events, "backward") == [(1000.0, 1032.0), (1100.0, 1102.0)]
    assert timing.host_spans(events, "backward") == [(100.0, 150.0), (300.0, 350.0)]
    assert timing.device_spans(events, "optimizer") == []
