"""From an alert to the profile that explains it: a real server, and real trainings whose loader is slow."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from builders import ServerProcess, job_environment, server_process, until, web
from commands import perfagent
from e2e.launching import JOBS
from preloaded import Running, started

pytestmark = pytest.mark.real
RULES = "[projects.watched.data_bound]\nprofile = true\n"


def environment(server: ServerProcess, folder: Path, run: str, **more: str) -> dict[str, str]:
    """Of a training in a project of its name."""
    more |= {"PERFAGENT_TEST_FOLDER": str(folder), "PERFAGENT_RUN_ID": run, "PERFAGENT_PROJECT": run}
    return job_environment(folder, PERFAGENT_SERVER=server.url, **more)


def alert_of(server: ServerProcess, run: str) -> dict[str, Any] | None:
    found = server.find(f"/runs/{run}/alerts")
    return next((one for one in found["alerts"] if one["rule"] == "data_bound"), None) if found else None


def losses(job: Running) -> list[str]:
    ended = job.communicate()
    assert ended.returncode == 0, ended
    return next(line for line in ended.stdout.splitlines() if line.startswith("LOSSES ")).split()[1:]


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_data_wait_is_profiled_once_and_its_alert_says_why(tmp_path: Path) -> None:
    data = tmp_path / "server" / "server-data"
    data.mkdir(parents=True)
    (data / "rules.toml").write_text(RULES)
    with server_process(tmp_path / "server") as server:

        def explained() -> dict[str, Any] | None:
            alert = alert_of(server, "watched")
            return alert if alert is not None and "causes" in alert["evidence"] else None

        environments = [environment(server, tmp_path, run) for run in ("watched", "other")]
        environments.append(environment(server, tmp_path, "plain", PERFAGENT_TEST_PLAIN="1"))
        with started([str(JOBS / "profiled_loader.py")], tmp_path / "jobs", environments) as (watched, other, plain):
            alert = until(explained, within_s=60, every_s=0.2, why="no profile explained the alert")
            until(lambda: alert_of(server, "other"), within_s=30, why="the other run has no alert")
            verdict = server.get("/runs/watched/verdict")
            (tmp_path / "go").touch()
            profiled, unprofiled, alone = losses(watched), losses(other), losses(plain)
        server.wait_for_state("watched", "finished")

        (order,) = server.get("/runs/watched/commands")["commands"]
        (profile,) = server.get("/runs/watched/profiles")["profiles"]
        assert (order["kind"], order["ranks"], order["state"]) == ("profile", [0], "done")
        for one in (order, profile):
            assert (one["rule"], one["alert"], one["who"]) == ("data_bound", alert["id"], "rule data_bound")
        assert server.get("/self")["counters"]["rule_profiles"] == {"asked": 1, "held_back": 0}

        divided = profile["shares"]
        assert divided["loader_s"] >= 5 * 0.04
        assert divided["loader_s"] <= divided["steps_s"]
        assert "in the data loader" in profile["says"][0]
        assert profile["says"][0] in alert["message"]
        assert profile["says"][0] in verdict["message"]
        (cause,) = alert["evidence"]["causes"]
        assert (cause["profile"], cause["url"]) == (profile["id"], profile["url"])
        assert [one["id"] for one in server.get(f"/alerts/{alert['id']}")["profiles"]] == [profile["id"]]

        trace = web().get(f"{server.url}{cause['url']}").content
        names = [event["name"] for event in json.loads(gzip.decompress(trace))["traceEvents"]]
        assert sum(name.startswith("ProfilerStep#") for name in names) == 5
        assert any("DataLoader" in name for name in names)

        assert alert_of(server, "other") is not None
        assert server.get("/runs/other/commands")["commands"] == [], "off unless the project switches it on"

        listed = perfagent(tmp_path, "profile", "watched", "--list", PERFAGENT_SERVER=server.url)
        assert f"data_bound ({alert['id']})" in listed.stdout
        shown = perfagent(tmp_path, "show", "watched", PERFAGENT_SERVER=server.url)
        assert f"--show {profile['id'][:12]}" in " ".join(shown.stdout.split())
    assert len(profiled) > profile["last_step"]
    assert alone[: len(profiled)] == profiled
    assert alone[: len(unprofiled)] == unprofiled
