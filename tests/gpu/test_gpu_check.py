"""scripts/gpu_check where there is no GPU: it says so, and its own code runs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOME = ("memory", "timing", "estimates")
"""Groups of one dry run; another has the others, so that each of them runs once."""


def run(*arguments: str, folder: Path, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "check.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("check"), importlib.import_module("report")


def test_without_a_gpu_it_ends_with_one_sentence(tmp_path):
    done = run(folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu_check: no NVIDIA GPU")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_trains_records_and_tells_what_it_could_not_check(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text("<!-- results:begin -->\n<!-- results:end -->\n", "utf-8")
    done = run("--dry-run-cpu", "--out", "out", "--only", *SOME, "--docs", str(page), folder=tmp_path)
    logs = "".join(log.read_text("utf-8") for log in (tmp_path / "out").glob("*.log"))
    assert done.returncode == 0, done.stdout + logs
    assert "nothing about a GPU" in done.stdout
    told = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    status = {one["check"]: one["status"] for one in told["results"]}
    assert status["running out of memory: the script's exception"] == "pass"
    assert status["... optimizer state"] == "pass"
    assert status["forward by events"] == "not checked"
    assert sum(check.startswith("memory of a training step") for check in status) == 5
    assert told["machine"]["device"] == "CPU (dry run)"
    assert page.read_text("utf-8") == "<!-- results:begin -->\n<!-- results:end -->\n", "a dry run is no result"
    from perfagent.delivery.spool import folders

    assert len(folders(tmp_path / "out" / "recorded" / "memory")) == 1, "what `perfagent sync` will send"


def test_every_other_group_runs_dry(tmp_path, checks):
    check, _ = checks
    others = [name for name in check.GROUPS if name not in SOME]
    done = run("--dry-run-cpu", "--out", "out", "--only", *others, folder=tmp_path)
    assert done.returncode == 0, done.stdout
    told = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    passed = {one["check"] for one in told["results"] if one["status"] == "pass"}
    assert passed >= {"losses of 60 steps with and without the agent", "floating-point operations of a step"}


def test_figures_that_must_agree(checks):
    _, report = checks
    near = report.compared("power", 104.0, 100.0, unit="W", share=0.05)
    assert (near.status, near.measured, near.expected) == ("pass", "104 W", "100 W ± 5 %")
    assert report.compared("power", 106.0, 100.0, unit="W", share=0.05).status == "FAIL"
    assert report.compared("idle", 3.0, 1.0, unit="%", share=0.05, within=2.5).status == "pass"
    assert report.compared("idle", float("nan"), 1.0, unit="%", within=2.5).status == "FAIL"


def test_a_section_takes_the_place_of_the_same_machine_and_date_only(checks, tmp_path):
    check, report = checks
    page = tmp_path / "gpu.md"
    page.write_text("# GPU\n\n<!-- results:begin -->\n\nIt has not run yet.\n\n<!-- results:end -->\nafter\n", "utf-8")

    def section(device: str, words: str) -> str:
        return report.markdown({"device": device, "date": "2026-01-01", "words": words}, [report.not_checked("x", "a|b")])

    check.put(page, section("H200", "first"))
    check.put(page, section("T4", "other"))
    check.put(page, section("H200", "second"))
    text = page.read_text("utf-8")
    assert "has not run" not in text
    assert "first" not in text
    assert text.count("### H200, 2026-01-01") == text.count("### T4, 2026-01-01") == 1
    assert "second. 0 passed, 0 failed, 1 not checked." in text
    assert "a\\|b" in text
    assert text.startswith("# GPU\n")
    assert text.endswith("<!-- results:end -->\nafter\n")
