"""Alerts that stop their run: where the project's rules, or the alert that a user made, say so, once each, audited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from builders import until
from fastapi.testclient import TestClient
from frames import state

from perfagent.errors import ConfigError
from perfagent_server.engine.rule_settings import read_rules_file


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path) as running:
        yield running


def start(client: TestClient) -> None:
    send(client, frame({"loss": [1.0]}, events=[state("starting", world_size=1)]))


def fire(client: TestClient, loss: float, seq: int = 2) -> list[dict[str, Any]]:
    """The commands of the run, once the alert has fired and all that it causes is done."""
    send(client, frame({"loss": [loss]}, seq=seq, first_step=seq))
    until(lambda: client.get("/api/v1/runs/r1/alerts").json()["alerts"])
    services_of(client).engine.run_once()
    services_of(client).database.write(lambda _: None)
    return list(client.get("/api/v1/runs/r1/commands").json()["commands"])


def stops(commands: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["rule"], one["who"]) for one in commands if one["kind"] == "stop"]


def test_a_rule_stops_only_where_it_is_told_to(client: TestClient) -> None:
    start(client)
    assert stops(fire(client, float("nan"))) == []


def test_a_rule_stops_once_and_is_audited(client: TestClient) -> None:
    changed = client.put("/api/v1/rules/nonfinite_loss", json={"stop": True}, headers=ADMIN)
    assert changed.json()["stop"] is True
    start(client)
    fire(client, float("nan"))
    assert stops(fire(client, float("nan"), 3)) == [("nonfinite_loss", "rule nonfinite_loss")]
    [entry] = client.get("/api/v1/audit", params={"action": "run.command"}, headers=ADMIN).json()["entries"]
    assert (entry["who"], entry["thing"], entry["detail"]) == ("rule nonfinite_loss", "r1", "stop")


def test_a_users_own_alert_stops(client: TestClient) -> None:
    form = {"name": "high", "metric": "loss", "comparison": ">", "threshold": 3, "for_steps": 1, "stop": True}
    assert client.post("/api/v1/rules/alerts", json=form, headers=ADMIN).json()["stop"] is True
    start(client)
    assert stops(fire(client, 5.0)) == [("own:high", "rule own:high")]


def test_the_file_of_rules_says_so_too(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text("[nonfinite_loss]\nstop = true\n")
    assert read_rules_file(file)[""] == {"nonfinite_loss": {"stop": True}}
    file.write_text("[nonfinite_loss]\nstop = 1\n")
    with pytest.raises(ConfigError, match="stop must be true or false"):
        read_rules_file(file)
