"""What a run is called by its verdict, in every list, filter and count of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from builders import until
from fastapi.testclient import TestClient
from frames import state
from sqlalchemy import update

from perfagent.wire import Event
from perfagent_server.store.tables import SET_ASIDE, rule_state
from perfagent_server.store.tables import run as runs

STEPS, BEGIN = 120, 1_700_000_000.0
SLOW = {"step_time_s": [0.5] * STEPS, "phase/data_s": [0.4] * STEPS, "phase/forward_s": [0.05] * STEPS}
FAST = {"step_time_s": [0.5] * STEPS, "phase/data_s": [0.001] * STEPS, "phase/forward_s": [0.45] * STEPS}
BEGINS = state("running", time=BEGIN + 1, step=0)


def train(client: TestClient, run: str, values: dict[str, list[float]], how: str = "finished", **more: Any) -> None:
    ends = [] if how == "running" else [state(how, time=BEGIN + STEPS, step=STEPS, **more)]
    send(client, frame(values, run=run, name=run, events=[BEGINS, *ends]))


def outcome(client: TestClient, run: str) -> str:
    return str(client.get(f"/api/v1/runs/{run}").json()["severity"])


def becomes(client: TestClient, run: str, severity: str) -> None:
    until(lambda: outcome(client, run) == severity)


def table(client: TestClient, **asked: Any) -> dict[str, Any]:
    answer = client.get("/api/v1/runs", params={"with": "verdict", **asked})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.sql
def test_runs_that_ended_are_found_by_their_verdicts(tmp_path: Path) -> None:
    """Also after a restart, in every list and comparison, and beside one that goes on."""
    with api(tmp_path) as client:
        train(client, "slow", SLOW)  # its data loader held it back
        train(client, "fast", FAST)
        train(client, "empty", {})  # nothing to judge
        for run, severity in (("slow", "critical"), ("fast", "healthy"), ("empty", "unknown")):
            becomes(client, run, severity)
        assert client.get("/api/v1/alerts", params={"state": "firing", "run": "slow"}).json()["alerts"] == []
        assert client.get("/api/v1/runs/slow/verdict").json()["rule"] == "data_bound"
        for severity in ("critical", "warning", "info", "healthy", "unknown"):
            expected = {"critical": ["slow"], "healthy": ["fast"], "unknown": ["empty"]}.get(severity, [])
            found = table(client, severity=severity)
            assert [(row["run"], row["severity"]) for row in found["runs"]] == [(run, severity) for run in expected]
            assert found["total"] == found["counts"]["severities"][severity] == len(expected)
        listed = {row["run"]: row["severity"] for row in client.get("/api/v1/runs").json()["runs"]}
        assert listed == {"slow": "critical", "fast": "healthy", "empty": "unknown"}
        compared = client.get("/api/v1/compare", params={"runs": list(listed)}).json()["sides"]
        assert {side["run"]: side["severity"] for side in compared} == listed
        train(client, "goes-on", FAST, "running")
        becomes(client, "goes-on", "healthy")
        worst_first = [row["severity"] for row in table(client, sort="severity")["runs"]]
        assert worst_first == ["critical", "unknown", "healthy", "healthy"]
        services_of(client).database.write(lambda connection: connection.execute(update(runs).values(outcome=None)))
    with api(tmp_path) as client:
        becomes(client, "slow", "critical")


@pytest.mark.parametrize("level", ["warning", "critical", "info"])
def test_severity_and_verdict_of_a_run_are_of_one_thing(client: TestClient, level: str) -> None:
    """Of its user's own alert, where nothing else is open."""
    said = Event(kind="alert", time=BEGIN + 2, step=STEPS, data={"title": "BLEU fell", "level": level})
    send(client, frame(FAST, run="own", name="own", events=[BEGINS, said]))
    until(lambda: client.get("/api/v1/alerts", params={"run": "own"}).json()["alerts"])
    (row,) = until(lambda: table(client)["runs"])
    own = row["verdict"]["rule"] == "user_alert" and row["verdict"]["title"] == "BLEU fell"
    assert (row["severity"], row["verdict"]["severity"], own) == (level, level, level != "info")


def test_a_run_that_ended_badly_is_not_healthy(client: TestClient) -> None:
    """Without a rule that says so, either."""
    for rule in ("process_crash", "oom_observed"):
        client.put(f"/api/v1/rules/{rule}", json={"enabled": False}, headers=ADMIN)
    for how in ("failed", "oom", "killed", "preempted"):
        train(client, how, FAST, how)
    until(lambda: table(client, severity="info")["total"] == 4)
    assert table(client, severity="healthy")["total"] == 0


def test_a_new_attempt_and_its_end_count_alone(client: TestClient) -> None:
    train(client, "slow", SLOW)
    becomes(client, "slow", "critical")
    begins = state("running", time=BEGIN + 200, step=0, start_step=1)
    send(client, frame(FAST, run="slow", attempt=2, events=[begins]))
    becomes(client, "slow", "healthy")
    ends = state("finished", time=BEGIN + 400, step=STEPS)
    send(client, frame({}, run="slow", attempt=2, seq=2, events=[ends]))
    becomes(client, "slow", "info")  # of all attempts, 40 % of the time went into waiting for data
    assert client.get("/api/v1/runs/slow/verdict").json()["severity"] == "info"


def test_a_run_that_the_rules_cannot_judge_is_not_healthy(client: TestClient) -> None:
    train(client, "going", FAST, "running")
    becomes(client, "going", "healthy")
    services = services_of(client)
    services.engine.stop()  # with a checkpoint: the run has a row of state, which nothing overwrites
    services.database.write(lambda connection: connection.execute(update(rule_state).values(version=SET_ASIDE)))
    assert outcome(client, "going") == "unknown"
    assert table(client, severity="healthy")["total"] == 0
