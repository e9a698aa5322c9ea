"""What a run is called by its verdict, in every list, filter and count of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import until
from fastapi.testclient import TestClient
from sqlalchemy import update

from perfagent.wire import Event
from perfagent_server.store.tables import SET_ASIDE, rule_state

STEPS = 120
SLOW = {"step_time_s": [0.5] * STEPS, "phase/data_s": [0.4] * STEPS, "phase/forward_s": [0.05] * STEPS}
FAST = {"step_time_s": [0.5] * STEPS, "phase/data_s": [0.001] * STEPS, "phase/forward_s": [0.45] * STEPS}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path) as client:
        yield client


def train(client: TestClient, run: str, values: dict[str, list[float]], state: str = "finished", **more: Any) -> None:
    began = Event(kind="state", time=1_700_000_001.0, step=0, data={"state": "running"})
    last = 1_700_000_000.0 + STEPS
    ends = [] if state == "running" else [Event(kind="state", time=last, step=STEPS, data={"state": state, **more})]
    send(client, frame(values, run=run, name=run, events=[began, *ends]))


def outcome(client: TestClient, run: str) -> str:
    return str(client.get(f"/api/v1/runs/{run}").json()["severity"])


def table(client: TestClient, **asked: Any) -> dict[str, Any]:
    answer = client.get("/api/v1/runs", params={"with": "verdict", **asked})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def ended(client: TestClient) -> TestClient:
    """One run that its data loader held back, one that nothing did, both ended; one that sent nothing to judge."""
    train(client, "slow", SLOW)
    train(client, "fast", FAST)
    train(client, "empty", {})
    until(lambda: [outcome(client, run) for run in ("slow", "fast", "empty")] == ["critical", "healthy", "unknown"])
    return client


def test_alerts_are_over_at_the_end_and_the_verdict_stays(ended: TestClient) -> None:
    assert ended.get("/api/v1/alerts", params={"state": "firing", "run": "slow"}).json()["alerts"] == []
    assert ended.get("/api/v1/runs/slow/verdict").json()["rule"] == "data_bound"


@pytest.mark.parametrize("severity", ["critical", "warning", "info", "healthy", "unknown"])
def test_a_filter_finds_runs_that_ended_by_their_verdicts(ended: TestClient, severity: str) -> None:
    expected = {"critical": ["slow"], "healthy": ["fast"], "unknown": ["empty"]}.get(severity, [])
    found = table(ended, severity=severity)
    assert [(row["run"], row["severity"]) for row in found["runs"]] == [(run, severity) for run in expected]
    assert found["total"] == len(expected)
    assert found["counts"]["severities"][severity] == len(expected)


def test_the_worst_verdict_comes_first_whether_its_run_goes_on_or_not(ended: TestClient) -> None:
    train(ended, "goes-on", FAST, state="running")
    until(lambda: outcome(ended, "goes-on") == "healthy")
    found = table(ended, sort="severity")["runs"]
    assert [row["severity"] for row in found] == ["critical", "unknown", "healthy", "healthy"]


@pytest.mark.parametrize("level", ["warning", "critical", "info"])
def test_severity_and_verdict_of_a_run_are_of_one_thing(client: TestClient, level: str) -> None:
    """Of its user's own alert, where nothing else is open."""
    said = Event(kind="alert", time=1_700_000_002.0, step=STEPS, data={"title": "BLEU fell", "level": level})
    began = Event(kind="state", time=1_700_000_001.0, step=0, data={"state": "running"})
    send(client, frame(FAST, run="own", name="own", events=[began, said]))
    until(lambda: client.get("/api/v1/alerts", params={"run": "own"}).json()["alerts"])
    (row,) = until(lambda: table(client)["runs"])
    own = row["verdict"]["rule"] == "user_alert" and row["verdict"]["title"] == "BLEU fell"
    assert (row["severity"], row["verdict"]["severity"], own) == (level, level, level != "info")


def test_a_list_and_a_comparison_call_runs_alike(ended: TestClient) -> None:
    listed = {row["run"]: row["severity"] for row in ended.get("/api/v1/runs").json()["runs"]}
    assert listed == {"slow": "critical", "fast": "healthy", "empty": "unknown"}
    compared = ended.get("/api/v1/compare", params={"runs": ["fast", "slow", "empty"]}).json()["sides"]
    assert {side["run"]: side["severity"] for side in compared} == listed


@pytest.mark.parametrize("state", ["failed", "oom", "killed", "preempted"])
def test_a_run_that_ended_badly_is_not_healthy_without_a_rule_that_says_so(client: TestClient, state: str) -> None:
    for rule in ("process_crash", "oom_observed"):
        client.put(f"/api/v1/rules/{rule}", json={"enabled": False}, headers=ADMIN)
    train(client, "bad", FAST, state=state)
    until(lambda: table(client, severity="info")["total"] == 1)
    assert table(client, severity="healthy")["total"] == 0


def test_a_new_attempt_and_its_end_count_alone(ended: TestClient) -> None:
    began = Event(kind="state", time=1_700_000_200.0, step=0, data={"state": "running", "start_step": 1})
    send(ended, frame(FAST, run="slow", attempt=2, events=[began]))
    until(lambda: outcome(ended, "slow") == "healthy")
    over = Event(kind="state", time=1_700_000_400.0, step=STEPS, data={"state": "finished"})
    send(ended, frame({}, run="slow", attempt=2, seq=2, events=[over]))
    until(lambda: outcome(ended, "slow") == "info")  # of all attempts, 40 % of the time went into waiting for data
    assert ended.get("/api/v1/runs/slow/verdict").json()["severity"] == "info"


def test_an_alert_that_is_closed_after_the_end_is_no_longer_its_verdict(client: TestClient) -> None:
    train(client, "bad", FAST, state="failed", exception="ValueError: no")
    until(lambda: outcome(client, "bad") == "critical")
    [alert] = client.get("/api/v1/alerts", params={"run": "bad", "state": "firing"}).json()["alerts"]
    assert client.post(f"/api/v1/alerts/{alert['id']}/resolve", headers=ADMIN).status_code == 200
    said = client.get("/api/v1/runs/bad/verdict").json()
    expected = "info" if said["rule"] == "healthy" else said["severity"]
    until(lambda: outcome(client, "bad") == expected)


def test_runs_that_ended_before_a_restart_are_settled_after_it(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        train(client, "slow", SLOW)
        until(lambda: outcome(client, "slow") == "critical")
        services = client.app.state.services  # type: ignore[attr-defined]
        services.database.write(lambda connection: connection.exec_driver_sql("UPDATE run SET outcome = NULL"))
    with api(tmp_path) as client:
        until(lambda: outcome(client, "slow") == "critical")


def test_a_run_that_the_rules_cannot_judge_for_now_is_not_healthy(client: TestClient) -> None:
    train(client, "going", FAST, state="running")
    until(lambda: outcome(client, "going") == "healthy")
    services = client.app.state.services  # type: ignore[attr-defined]
    services.engine.stop()  # with a checkpoint: the run has a row of state, which nothing overwrites
    services.database.write(lambda connection: connection.execute(update(rule_state).values(version=SET_ASIDE)))
    assert outcome(client, "going") == "unknown"
    assert table(client, severity="healthy")["total"] == 0
