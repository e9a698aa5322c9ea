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

pytestmark = pytest.mark.real


@contextlib.contextmanager
def job(server: ServerProcess, folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training in the background; it ends when the file `go` is there, and is killed if the test fails before."""
    more = {"PERFAGENT_TEST_FOLDER": str(folder), "PERFAGENT_RUN_ID": "job"}
    environment = job_environment(folder, PERFAGENT_SERVER=server.url, **more)
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


def test_a_profile_is_asked_for_and_a_nan_names_its_module(server: ServerProcess, tmp_path: Path) -> None:
    with job(server, tmp_path, str(JOBS / "busy.py")):
        until(lambda: steps(server, 5), within_s=120)
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
        stacks = ask(server, kind="stacks")
        until(lambda: settled(server, stacks)["sources"], within_s=60)
        [group] = server.get("/runs/job/stacks", command=stacks)["groups"]
        assert group["ranks"] == [0] and any("busy.py" in frame for frame in group["frames"])
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


@pytest.mark.timeout(300)
def test_rank_that_does_not_join_is_named_with_its_line(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(JOBS / "absent_rank.py"))

    def named() -> dict[str, Any] | None:
        found = server.find("/runs/job/verdict")
        return found if found is not None and "absent" in found["evidence"] else None

    with server_process(tmp_path / "server") as server, job(server, tmp_path, *launch):
        until(lambda: steps(server, 11), within_s=120)
        found = until(named, within_s=40, every_s=0.5, why="nobody was named")
        assert (found["rule"], found["ranks"], found["cause"]) == ("hang", [1], "a rank stands apart")
        for words in (
            r"rank 1 at absent_rank\.py:\d+ in wait_for_a_lock: time\.sleep\(0\.2\); rank 0 waiting at absent_rank\.py:\d+",
            r"Rank 1 did not join collective #\d+ \(all_reduce\) of process group 0",
        ):
            assert re.search(words, found["message"]), found["message"]
        others = [one["rule"] for one in server.get("/runs/job/findings")["findings"] if one["severity"] != "info"]
        assert others == ["hang", "rank_absent"]
        alerts = [one for one in server.get("/runs/job/alerts")["alerts"] if one["severity"] != "info"]
        assert [alert["rule"] for alert in alerts] == ["hang"], "one alert for one thing"
        assert "did not join" in alerts[0]["message"]
