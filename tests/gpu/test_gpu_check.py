"""scripts/gpu_check where there is no GPU: it says so, and its own code runs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import until

HERE = Path(__file__).resolve().parent
SOME = ("memory", "timing", "estimates")
OTHERS = {
    ("synchronization", "overhead"): "losses of 60 steps with and without the agent",
    ("utilization", "figures"): "floating-point operations of a step",
    ("diagnosis",): "diagnosis of a job that is ill: copies",
    ("compute",): "losses with checkpoint_activations('all')",
}
"""Groups of the dry runs, so that each of them runs once; of the others something that a CPU passes, too."""


def run(*arguments: str, folder: Path, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "check.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(("groups", "passes"), OTHERS.items(), ids=["-".join(groups) for groups in OTHERS])
def test_every_other_group_runs_dry(tmp_path, groups, passes):
    done = run("--dry-run-cpu", "--out", "out", "--only", *groups, folder=tmp_path)
    assert done.returncode == 0, done.stdout
    told = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    assert passes in {one["check"] for one in told["results"] if one["status"] == "pass"}


def test_each_group_runs_dry_in_one_of_these(checks):
    check, _ = checks
    assert sorted([*SOME, *(name for groups in OTHERS for name in groups)]) == sorted(check.GROUPS)


def test_what_was_found_stays_where_the_machine_is_taken_away(checks, monkeypatch, tmp_path):
    check, report = checks

    def group(name, _stage):
        if name == "overhead":
            raise KeyboardInterrupt
        return [report.not_checked(name, "no GPU")]

    monkeypatch.setattr(check, "_in_its_own_process", group)
    monkeypatch.setattr(
        check, "_told_by_another_process", lambda _stage: {"device": "H100", "date": "2026-01-01", "words": "H100"}
    )
    monkeypatch.setattr(sys, "argv", ["check.py", "--dry-run-cpu", "--out", str(tmp_path / "out")])
    with pytest.raises(KeyboardInterrupt):
        check.main()
    told = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    assert [one["check"] for one in told["results"]] == ["synchronization"]


def test_results_of_several_calls_become_one_section(checks, monkeypatch, tmp_path, capsys):
    """A machine may be lent for ten minutes a call."""
    check, report = checks
    machine = {"device": "H100", "date": "2026-01-01", "words": "H100, torch 2.13", "torch": "2.13", "commit": "abc"}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        report.save(tmp_path / name, machine, [report.Result(name, "1", "1", "pass")])
    page = tmp_path / "gpu.md"
    page.write_text("<!-- results:begin -->\n<!-- results:end -->\n", "utf-8")
    folders = [str(tmp_path / name) for name in ("first", "second")]
    joins = ["check.py", "--out", str(tmp_path / "all"), "--docs", str(page), "--join", *folders]
    monkeypatch.setattr(sys, "argv", joins)
    assert check.main() == 0
    assert "2 passed, 0 failed" in page.read_text("utf-8")
    report.save(tmp_path / "second", machine | {"device": "T4"}, [])
    with pytest.raises(SystemExit):
        check.main()
    assert "several machines" in capsys.readouterr().err


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work", "utf-8")
    done = run("--dry-run-cpu", "--out", str(tmp_path), folder=tmp_path)
    assert done.returncode == 2
    assert "holds something else" in done.stderr
    assert (tmp_path / "thesis.tex").exists()


def test_a_group_that_hangs_takes_its_trainings_with_it(checks, monkeypatch, tmp_path):
    """They would hold the device that the next group needs."""
    check, _ = checks
    stage = importlib.import_module("stage").Stage(tmp_path, dry=True)
    hangs = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    monkeypatch.setattr(check, "_myself", lambda *_: [sys.executable, "-c", hangs])
    monkeypatch.setitem(check.GROUPS, "memory", ("hangs", 2))
    wait = subprocess.Popen.wait

    def wait_once_it_trains(process, timeout=None):
        if timeout is not None:
            until(lambda: (tmp_path / "memory.log").read_text("utf-8"), why="the group has not begun to train")
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_it_trains)
    (result,) = check._in_its_own_process("memory", stage)
    assert (result.status, result.measured) == ("FAIL", "none in 2 s")
    training = int((tmp_path / "memory.log").read_text("utf-8"))
    until(lambda: not _runs(training), why="the training outlived its group")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_figures_that_must_agree(checks):
    _, report = checks
    near = report.compared("power", 104.0, 100.0, unit="W", share=0.05)
    assert (near.status, near.measured, near.expected) == ("pass", "104 W", "100 W ± 5 %")
    assert report.compared("power", 106.0, 100.0, unit="W", share=0.05).status == "FAIL"
    assert report.compared("idle", 3.0, 1.0, unit="%", share=0.05, within=2.5).status == "pass"
    assert report.compared("idle", float("nan"), 1.0, unit="%", within=2.5).status == "FAIL"


def _launched(correlation: int, at: float, begin: float, *, thread: int = 1) -> list[dict[str, object]]:
    """A kernel of 2 µs as the profiler's trace tells it."""
    both = {"args": {"correlation": correlation}}
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": thread, "ts": at, "dur": 1, **both}
    return [call, {"cat": "kernel", "name": "k", "tid": 7, "ts": begin, "dur": 2, **both}]


def test_a_phase_on_the_device_is_what_any_thread_launched_meanwhile(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    timing = importlib.import_module("timing")
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


def test_nvidia_smi_is_asked_of_the_training_s_board_and_what_it_knows_before_the_load_begins(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HERE))
    figures, stage = importlib.import_module("figures"), importlib.import_module("stage")
    done: list[str] = []

    class Child:
        def __init__(self, *_arguments: object, **_options: object) -> None: ...

        def ask(self, order: str) -> None:
            done.append(order)

        def tell(self, order: str) -> None:
            done.append(order)

        def _answer(self) -> dict[str, float]:
            return {"begin": 0.0, "end": 20.0, "wall_s": 20.0, "steps": 10}

        def end(self) -> None: ...

    def rows(command: list[str], _split: object) -> list[list[str]]:
        assert command[command.index("-i") + 1] == "GPU-3f"
        done.append(command[3])
        return [["1"]]

    monkeypatch.setattr(figures, "Child", Child)
    monkeypatch.setattr(figures, "_board", lambda: "GPU-3f")
    monkeypatch.setattr(figures, "_rows", rows)
    monkeypatch.setattr(
        figures, "_watched", lambda board, fields, _seconds: done.append(f"{board} {len(fields)}") or ({}, {})
    )
    monkeypatch.setattr(figures.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(figures, "recorded", lambda _folder: figures.Recording({}, []))
    assert {one.status for one in figures.check(stage.Stage(tmp_path))} == {"not checked"}
    asked, load = len(figures.PLAIN), f"load {figures.WATCHED_S}"
    assert done[asked:] == [f"load {figures.WARM_UP_S}", load, f"GPU-3f {asked}"]


def test_a_machine_without_nvidia_smi_keeps_its_results(checks, monkeypatch, tmp_path):
    check, _ = checks
    figures = importlib.import_module("figures")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check._said("nvidia-smi", "-L") == ""
    assert list(figures._rows(["nvidia-smi", "-L"], str.split)) == []


def test_a_section_takes_the_place_of_the_same_machine_and_date_only(checks, tmp_path):
    check, report = checks
    page = tmp_path / "gpu.md"
    page.write_text("# GPU\n\n<!-- results:begin -->\n\nIt has not run yet.\n\n<!-- results:end -->\nafter\n", "utf-8")

    def section(device: str, words: str) -> str:
        return report.markdown(
            {"device": device, "date": "2026-01-01", "words": words}, [report.not_checked("x", "a|b")]
        )

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
