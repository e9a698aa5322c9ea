"""The demo as a user starts it, on a fresh machine: nothing in its folders, any free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from builders import ServerProcess, job_environment, until
from code_blocks import prints
from documents import ROOT, Document

DEMO = [sys.executable, "-m", "perfagent", "demo"]


pytestmark = pytest.mark.real


def demo(folder: Path, *arguments: str, timeout_s: float = 170, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*DEMO, *arguments, "--exit"]
    return subprocess.run(
        command, env=job_environment(folder, **env), capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.long
def test_a_short_demo_ends_by_itself_and_is_judged_healthy(tmp_path: Path) -> None:
    done = demo(tmp_path, "--port", "0", "--steps", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/run/demo-none-", done.stdout)
    assert "state:   finished at step 40" in done.stdout
    assert "verdict: healthy" in done.stdout
    assert "verdict at step" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith("perfagent up")


@pytest.mark.parametrize(
    ("fault", "state", "rule", "page"),
    [
        ("nan", "finished", "nonfinite_loss", "loss-nan"),
        pytest.param("sync", "finished", "sync_bound", "", marks=pytest.mark.long),
        pytest.param("exception", "failed", "process_crash", "killed-without-a-word", marks=pytest.mark.long),
        pytest.param("oom", "oom", "oom_observed", "cuda-out-of-memory", marks=pytest.mark.long),
        pytest.param("killed", "killed", "process_crash", "killed-without-a-word", marks=pytest.mark.long),
    ],
)
def test_a_fault_of_the_demo_ends_in_its_verdict(tmp_path: Path, fault: str, state: str, rule: str, page: str) -> None:
    done = demo(tmp_path, "--port", "0", "--steps", "40", "--fault", fault)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"state:   {state} at step" in done.stdout
    assert f"verdict: {rule} (" in done.stdout
    assert "fix:     " in done.stdout
    if page:
        path = ROOT / "docs" / "symptoms" / f"{page}.md"
        blocks = [piece.text for piece in Document(path, path.read_text("utf-8")).code() if piece.language == "text"]
        ends = done.stdout[done.stdout.index("state:   ") :].partition("the demo's server")[0]
        assert any(prints(f"...{block.removesuffix(chr(10))}...", ends) for block in blocks), ends


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("fault", "state", "rule", "words"),
    [
        ("straggler", "finished", "straggler", r"Rank 2 needs .* of it in forward"),
        ("hang", "preempted", "hang", r"No step for .* after step 19 "),
        ("leak", "finished", "host_memory_leak", r"The memory of the training processes grew from"),
    ],
    ids=["straggler", "hang", "leak"],
)
def test_fault_of_several_ranks_raises_its_alert_and_no_other(
    server: ServerProcess, tmp_path: Path, fault: str, state: str, rule: str, words: str
) -> None:
    done = demo(tmp_path, "--steps", "40", "--fault", fault, timeout_s=450, PERFAGENT_SERVER=server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"state:   {state} at step" in done.stdout
    assert re.search(rf"verdict: {rule} \(\w+\): {words}", done.stdout), done.stdout
    [run] = server.get("/runs")["runs"]
    alerts = server.get(f"/runs/{run['run']}/alerts")["alerts"]
    assert [alert["rule"] for alert in alerts if alert["severity"] != "info"] == [rule], alerts
    if fault == "hang":
        stacks = server.get(f"/runs/{run['run']}/stacks")
        frames = {group["ranks"][0]: group["frames"] for group in stacks["groups"]}
        assert any("read_from_a_pipe_that_stays_empty" in frame for frame in frames[1]), frames
        assert not any("read_from_a_pipe_that_stays_empty" in frame for frame in frames[0]), frames


@pytest.mark.long
@pytest.mark.timeout(300)
def test_job_that_hangs_stays_until_ctrl_c_which_ends_all_of_it(tmp_path: Path) -> None:
    output = tmp_path / "said"
    command = [*DEMO, "--steps", "40", "--fault", "hang", "--port", "0"]
    with output.open("w+b") as said:
        process = subprocess.Popen(command, env=job_environment(tmp_path), stdout=said)
        try:
            until(lambda: b"press Ctrl-C to stop it" in output.read_bytes(), within_s=160, every_s=0.5)
            others = psutil.Process(process.pid).children(recursive=True)
            assert len(others) >= 3, "a server and two ranks"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0, output.read_text()
        finally:
            process.kill()
            process.wait()
    assert "state:   preempted at step 19" in output.read_text()
    assert psutil.wait_procs(others, timeout=30)[1] == []


@pytest.mark.parametrize(("ends", "when"), [("SIGHUP", b"dashboard: http"), ("SIGTERM", b"step ")])
def test_demo_whose_terminal_closes_leaves_no_process(tmp_path: Path, ends: str, when: bytes) -> None:
    output = tmp_path / "said"
    with output.open("w+b") as said:
        process = subprocess.Popen([*DEMO, "--port", "0"], env=job_environment(tmp_path), stdout=said)
        try:
            until(lambda: when in output.read_bytes(), within_s=100)
            others = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.Signals[ends])
            assert process.wait(timeout=60) == 128 + signal.Signals[ends]
        finally:
            process.kill()
            process.wait()
    assert others and psutil.wait_procs(others, timeout=30)[1] == []
