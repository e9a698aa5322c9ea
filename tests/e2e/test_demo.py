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

DEMO = [sys.executable, "-m", "perfagent", "demo"]


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, "--port", "0", *arguments],
        env=job_environment(folder),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


@pytest.mark.long
def test_a_short_demo_ends_by_itself_and_is_judged_healthy(tmp_path: Path) -> None:
    done = demo(tmp_path, "--steps", "40", "--exit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/run/demo-none-", done.stdout)
    assert "state:   finished at step 40" in done.stdout
    assert "verdict: healthy" in done.stdout
    assert "verdict at step" not in done.stdout
    assert "loss -" not in done.stdout
    assert "Nothing to judge yet" not in done.stdout
    assert done.stdout.splitlines()[-1].endswith("perfagent up")


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("nan", "nonfinite_loss"),
        pytest.param("data-stall", "data_bound", marks=pytest.mark.long),
        pytest.param("sync", "sync_bound", marks=pytest.mark.long),
    ],
)
def test_a_fault_of_the_demo_ends_in_its_verdict(tmp_path: Path, fault: str, rule: str) -> None:
    done = demo(tmp_path, "--steps", "40", "--fault", fault, "--exit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"verdict: {rule} (" in done.stdout
    assert "fix:     " in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "state", "rule"),
    [("exception", "failed", "process_crash"), ("oom", "oom", "oom_observed"), ("killed", "killed", "process_crash")],
)
def test_a_job_that_dies_says_how(tmp_path: Path, fault: str, state: str, rule: str) -> None:
    done = demo(tmp_path, "--steps", "20", "--fault", fault, "--exit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"state:   {state} at step" in done.stdout
    assert f"verdict: {rule} (" in done.stdout


def test_a_fault_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    done = demo(tmp_path, "--fault", "nonsense", "--exit")
    assert done.returncode in (1, 2)
    assert "nonsense" in done.stderr
    assert "data-stall" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_server_that_stalls_at_the_end_of_the_job_gets_the_rest(server: ServerProcess, tmp_path: Path) -> None:
    environment = job_environment(tmp_path, PERFAGENT_SERVER=server.url)
    assert server.process is not None
    stalled = psutil.Process(server.process.pid)
    with subprocess.Popen(
        [*DEMO, "--steps", "200", "--fault", "nan", "--exit"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("step ") for line in process.stdout)
        [job] = psutil.Process(process.pid).children()
        stalled.suspend()
        job.wait(60)
        stalled.resume()
        said = process.stdout.read()
    assert process.returncode == 0, said
    assert "state:   finished at step 200" in said


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("fault", "state", "rule", "words"),
    [
        ("straggler", "finished", "straggler", r"Rank 2 needs .* of it in forward"),
        ("hang", "preempted", "hang", r"No step has ended for .* after step 19;"),
        ("leak", "finished", "host_memory_leak", r"The memory of the training processes grew from"),
    ],
    ids=["straggler", "hang", "leak"],
)
def test_a_fault_of_several_ranks_or_minutes_raises_its_alert_and_no_other(
    server: ServerProcess, tmp_path: Path, fault: str, state: str, rule: str, words: str
) -> None:
    done = subprocess.run(
        [*DEMO, "--steps", "40", "--fault", fault, "--exit"],
        env=job_environment(tmp_path, PERFAGENT_SERVER=server.url),
        capture_output=True,
        text=True,
        timeout=450,
        check=False,
    )
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
def test_a_job_that_hangs_is_there_until_ctrl_c_which_ends_all_of_it(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w+b") as said:
        process = subprocess.Popen(
            [*DEMO, "--steps", "40", "--fault", "hang", "--port", "0"], env=job_environment(tmp_path), stdout=said
        )
        try:
            until(
                lambda: b"press Ctrl-C to stop it" in (tmp_path / "said").read_bytes(), within_s=160, every_s=0.5,
                why="nobody was told that the job hangs",
            )  # fmt: skip
            others = psutil.Process(process.pid).children(recursive=True)
            assert len(others) >= 3, "a server and two ranks"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0, (tmp_path / "said").read_text()
        finally:
            process.kill()
            process.wait()
    assert "state:   preempted at step 19" in (tmp_path / "said").read_text()
    assert psutil.wait_procs(others, timeout=30)[1] == []


@pytest.mark.long
@pytest.mark.timeout(240)
def test_ctrl_c_while_ranks_train_ends_all_of_them(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w+b") as said:
        process = subprocess.Popen(
            [*DEMO, "--fault", "straggler", "--port", "0"], env=job_environment(tmp_path), stdout=said
        )
        try:
            until(
                lambda: b"step 40/400" in (tmp_path / "said").read_bytes(), within_s=120, every_s=0.5,
                why="it does not train",
            )  # fmt: skip
            others = psutil.Process(process.pid).children(recursive=True)
            assert len(others) >= 5, "a server and four ranks"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130, (tmp_path / "said").read_text()
        finally:
            process.kill()
            process.wait()
    assert psutil.wait_procs(others, timeout=30)[1] == []
