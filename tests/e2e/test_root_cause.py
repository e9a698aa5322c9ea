"""From a command to its result, and from a bad step to its alert: a real server, real trainings, real processes."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import ServerProcess, job_environment, server_process, sync, until, web
from e2e.launching import JOBS


@contextlib.contextmanager
def job(server: ServerProcess, folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training in the background; it ends when the file `go` is there, and is killed if the test fails before."""
    environment = job_environment(
        folder, PERFAGENT_SERVER=server.url, PERFAGENT_TEST_FOLDER=str(folder), PERFAGENT_RUN_ID="job"
    )
    with (folder / "job.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        (folder / "go").touch()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    sync(environment)


def steps(server: ServerProcess, least: int) -> bool:
    found = server.find("/runs/job")
    return found is not None and found["step"] >= least


def settled(server: ServerProcess, identity: str, *, of: int = 1) -> dict[str, Any]:
    """The command, once so many processes have answered it for good; else an empty one."""
    (order,) = [one for one in server.get("/runs/job/commands")["commands"] if one["id"] == identity]
    done = [one for one in order["sources"] if one["state"] in ("done", "refused")]
    return order if len(done) >= of else {"sources": []}


def ask(server: ServerProcess, **body: Any) -> str:
    return str(server.admin("POST", "/runs/job/commands", body)["id"])


def test_a_profile_is_asked_for_taken_sent_and_downloaded(server: ServerProcess, tmp_path: Path) -> None:
    with job(server, tmp_path, str(JOBS / "busy.py")):
        until(lambda: steps(server, 5), within_s=60)
        profile = ask(server, kind="profile", steps=3)
        order = until(lambda: (one := settled(server, profile))["sources"] and one, within_s=60)
        assert order["state"] == "done", order
        (listed,) = server.get("/runs/job/profiles")["profiles"]
        assert listed["last_step"] - listed["first_step"] == 2
        assert listed["command"] == profile
        assert listed["trace"] == "complete"
        answer = web().get(f"{server.url}/api/v1/runs/job/profiles/{listed['id']}", timeout=30)
        assert answer.headers["content-disposition"].endswith('.json.gz"')
        names = [event["name"] for event in json.loads(gzip.decompress(answer.content))["traceEvents"]]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 3
        rows = server.get(f"/runs/job/profiles/{listed['id']}/operators")["operators"]
        assert {"aten::addmm": 9}.items() <= {row["name"]: row["calls"] for row in rows}.items()

        sampling, flush = ask(server, kind="sampling", sample_s=0.5), ask(server, kind="flush")
        assert until(lambda: settled(server, sampling).get("state"), within_s=30) == "done"
        assert until(lambda: settled(server, flush).get("state"), within_s=30) == "done"


@pytest.mark.long
def test_a_nan_names_its_module_and_parameter_in_its_alert(server: ServerProcess, tmp_path: Path) -> None:
    with job(server, tmp_path, str(JOBS / "busy.py")):
        until(lambda: steps(server, 5), within_s=60)
    server.wait_for_state("job", "finished")

    def explained() -> dict[str, Any] | None:
        alerts = [alert for alert in server.get("/runs/job/alerts")["alerts"] if alert["rule"] == "nonfinite_loss"]
        return alerts[0] if alerts and "causes" in alerts[0]["evidence"] else None

    alert = until(explained, within_s=30, why="the alert was never explained")
    (cause,) = alert["evidence"]["causes"]
    assert (cause["module"], cause["module_class"], cause["parameter"]) == ("1", "Linear", "1.weight")
    assert cause["step"] == alert["since_step"]
    assert (cause["rank"], cause["loss_dtype"], cause["lr"]) == (0, "float32", 1e-3)
    assert "batch" not in cause, "the loop keeps its batch in no variable"
    assert [tensor["name"] for tensor in cause["later_batch"]["tensors"]] == ["input"]
    assert "'1.weight' of module '1' (Linear)" in alert["message"]


@pytest.mark.long
@pytest.mark.timeout(170)
def test_stacks_of_a_hang_show_every_rank_and_which_one_is_elsewhere(server: ServerProcess, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(JOBS / "hanging.py"))
    with job(server, tmp_path, *launch):
        until(lambda: steps(server, 19), within_s=90)
        stacks = ask(server, kind="stacks")
        until(lambda: len(settled(server, stacks, of=2)["sources"]) == 2, within_s=60, why="not both ranks answered")
        found = server.get("/runs/job/stacks", command=stacks)
        assert [one["rank"] for one in found["stacks"]] == [0, 1]
        groups = {group["ranks"][0]: group["frames"] for group in found["groups"]}
        assert any("read_from_a_dead_disk" in frame for frame in groups[1])
        assert any("backward" in frame or "all_reduce" in frame or "forward" in frame for frame in groups[0]), groups[0]
        assert not any("read_from_a_dead_disk" in frame for frame in groups[0])
        age = until(
            lambda: server.get("/runs/job/latest").get("step_age_s"), within_s=30, why="no heartbeat of steps came"
        )
        assert age["value"] >= 5
    server.wait_for_state("job", "finished", within_s=60)


@pytest.mark.timeout(300)
def test_a_rank_that_does_not_join_is_named_with_its_line_and_the_collective(tmp_path: Path) -> None:
    data = tmp_path / "server" / "server-data"
    data.mkdir(parents=True)
    # A pause of the machine counts once here, not five times.
    (data / "rules.toml").write_text("[hang]\nfor_s = 6.0\npause_times = 1.0\n")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(JOBS / "absent_rank.py"))

    def named() -> dict[str, Any] | None:
        found = server.find("/runs/job/verdict")
        return found if found is not None and "absent" in found["evidence"] else None

    with server_process(tmp_path / "server") as server, job(server, tmp_path, *launch):
        until(lambda: steps(server, 11), within_s=120)
        found = until(named, within_s=40, every_s=0.5, why="nobody was named")
        assert (found["rule"], found["ranks"], found["cause"]) == ("hang", [1], "a rank stands apart")
        assert re.search(
            r"Rank 1 stands at absent_rank\.py:\d+ in wait_for_a_lock: time\.sleep\(0\.2\); "
            r"rank 0 waits at absent_rank\.py:\d+ in <module>: dist\.all_reduce\(parameter\.grad\)",
            found["message"],
        ), found["message"]
        assert re.search(r"Rank 1 did not join all_reduce number \d+ of process group 0", found["message"]), found[
            "message"
        ]
        others = [one["rule"] for one in server.get("/runs/job/findings")["findings"] if one["severity"] != "info"]
        assert others == ["hang", "rank_absent"]
        alerts = [one for one in server.get("/runs/job/alerts")["alerts"] if one["severity"] != "info"]
        assert [alert["rule"] for alert in alerts] == ["hang"], "one alert for one thing"
        assert "did not join" in alerts[0]["message"]


def perfagent(*words: str, server: ServerProcess, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = job_environment(folder, PERFAGENT_SERVER=server.url)
    command = [sys.executable, "-m", "perfagent", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.long
def test_the_commands_ask_wait_and_show(server: ServerProcess, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    with job(server, tmp_path, str(JOBS / "busy.py")):
        until(lambda: steps(server, 5), within_s=60)
        shown = perfagent("profile", "busy", "--steps", "2", "-o", str(trace), server=server, folder=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert "SELF CPU ms" in shown.stdout
        assert "aten::addmm" in shown.stdout
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        stacks = perfagent("stacks", "busy", server=server, folder=tmp_path)
        assert stacks.returncode == 0, stacks.stderr
        assert stacks.stdout.startswith("rank 0\n")
        assert "busy.py" in stacks.stdout
        wrong = perfagent("profile", "busy", "--steps", "1000", server=server, folder=tmp_path)
        assert wrong.returncode == 2
        assert "a whole number from 1 to 100" in wrong.stderr
    server.wait_for_state("job", "finished")
    ended = perfagent("stacks", "busy", server=server, folder=tmp_path)
    assert ended.returncode == 1
    assert "has ended (finished)" in ended.stderr
