"""`GET /runs?with=...`: one screen of the table of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from fastapi.testclient import TestClient
from sqlalchemy import insert

from perfagent.wire import Event
from perfagent_server.store.tables import alert


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path) as client:
        yield client


def screen(client: TestClient, **asked: Any) -> dict[str, Any]:
    answer = client.get("/api/v1/runs", params={"with": "verdict,latest,timing,trend", **asked}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [one["run"] for one in found["runs"]]


def fire(client: TestClient, run: str, severity: str, **changes: Any) -> None:
    """A row as the keeper of alerts writes it, so that the table is tested apart from the rules."""
    row = {
        "id": f"{run}-{severity}", "run": run, "rule": "a_rule", "severity": severity, "state": "firing",
        "title": "Something is wrong", "message": "", "since": 1.0, **changes,
    }  # fmt: skip
    services = client.app.state.services  # type: ignore[attr-defined]
    services.database.write(lambda connection: connection.execute(insert(alert).values(row)))


def test_a_row_has_its_verdict_newest_values_throughput_and_trend(client: TestClient) -> None:
    steps = range(1, 201)
    send(
        client, frame({"loss": [1 / step for step in steps], "samples_per_s": [64.0] * 200, "step_time_s": [0.5] * 200})
    )
    found = screen(client)
    row = found["runs"][0]
    assert found["total"] == 1
    assert found["next"] is None
    assert row["severity"] == "healthy"
    assert not row["needs_attention"]
    assert row["latest"]["loss"] == 1 / 200
    assert row["timing"]["throughput"] == 64.0
    assert row["timing"]["step_time_s"] == 0.5
    assert row["timing"]["throughput_name"] == "samples_per_s"
    assert row["trend"][0] > row["trend"][-1] > 0
    assert {"rule", "title", "severity"} <= row["verdict"].keys()


def test_by_severity_the_worst_come_first_then_the_newest(client: TestClient) -> None:
    for run in ("calm", "bad", "meek", "calm2"):
        send(client, frame({"loss": [1.0]}, run=run))
    fire(client, "bad", "critical")
    fire(client, "meek", "warning")
    found = screen(client, sort="severity")
    assert names(found)[:2] == ["bad", "meek"]
    assert found["counts"]["severities"] == {"critical": 1, "warning": 1, "info": 0, "healthy": 2, "unknown": 0}
    assert names(screen(client, sort="severity", order="asc"))[-1] == "bad"


def test_attention_is_an_open_alert_that_nobody_acknowledged(client: TestClient) -> None:
    for run in ("seen", "unseen", "noted", "over"):
        send(client, frame({"loss": [1.0]}, run=run))
    fire(client, "seen", "critical", acknowledged=2.0)
    fire(client, "unseen", "warning")
    fire(client, "noted", "info")
    fire(client, "over", "critical", state="resolved", resolved=2.0)
    found = screen(client, attention=True)
    assert names(found) == ["unseen"]
    assert found["counts"]["attention"] == 1
    assert found["counts"]["all"] == 4, "the counts are what one may choose from"


def test_sorted_by_a_metric_or_a_setting_those_without_come_last(client: TestClient) -> None:
    for n, (run, loss) in enumerate({"b": 2.0, "a": 1.0, "nan": math.nan}.items()):
        begins = Event(
            kind="state", time=1.0, step=0, data={"state": "starting", "config": {"optimizer": {"lr": 10.0**n}}}
        )
        send(client, frame({"loss": [loss], "x": [1.0]}, run=run, events=[begins]))
    send(client, frame({"other": [1.0]}, run="none"))
    assert names(screen(client, sort="loss"))[:2] == ["a", "b"]
    assert names(screen(client, sort="loss", order="desc"))[:2] == ["b", "a"]
    assert set(names(screen(client, sort="loss"))[2:]) == {"nan", "none"}
    found = screen(client, sort="config:optimizer.lr", order="desc", columns="config:optimizer.lr,x")
    assert names(found)[:3] == ["nan", "a", "b"]
    assert found["runs"][0]["config"] == {"optimizer.lr": 100.0}
    assert found["runs"][0]["latest"]["x"] == 1.0


def test_pages_follow_each_other_without_a_gap_or_a_run_twice(client: TestClient) -> None:
    for n in range(7):
        send(client, frame({"loss": [1.0]}, run=f"r{n}"))
    offset, seen = 0, []
    while offset is not None:
        found = screen(client, limit=3, offset=offset, sort="name")
        seen += names(found)
        offset = found["next"]
    assert seen == [f"r{n}" for n in range(7)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("gpt", {"gpt-1", "gpt-2"}),
        ("GPT 2", {"gpt-2"}),
        ("wrong", {"bert"}),
        ("/gpt-[2-9]/", {"gpt-2"}),
        ("/^bert$|gpt-1/", {"bert", "gpt-1"}),
        ("100%", set()),
    ],
)
def test_words_must_all_be_there_and_slashes_make_an_expression(
    client: TestClient, asked: str, expected: set[str]
) -> None:
    for run in ("gpt-1", "gpt-2", "bert"):
        send(client, frame({"loss": [1.0]}, run=run))
    fire(client, "bert", "warning")
    assert set(names(screen(client, q=asked))) == expected


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"q": "/(/"}, "q is no regular expression"),
        ({"with": "everything"}, "with is 'everything'; allowed are verdict, latest, timing, trend, config"),
        ({"severity": "bad"}, "severity is 'bad'; allowed are critical, warning, info, healthy, unknown"),
        ({"state": "asleep"}, "state is 'asleep'; allowed are "),
    ],
)
def test_what_cannot_be_asked_is_told(client: TestClient, asked: dict[str, str], said: str) -> None:
    answer = client.get("/api/v1/runs", params={"with": "latest", **asked}, headers=ADMIN)
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"]


def test_a_row_is_made_again_when_an_alert_of_its_run_changes(client: TestClient) -> None:
    send(client, frame({"loss": [1.0]}, run="r1"))
    assert screen(client)["runs"][0]["severity"] == "healthy"
    fire(client, "r1", "critical")
    row = screen(client)["runs"][0]
    assert (row["severity"], row["needs_attention"]) == ("critical", True)
    assert row["alerts"]["firing"] == {"critical": 1}
    assert row["alerts"]["title"] == "Something is wrong"
