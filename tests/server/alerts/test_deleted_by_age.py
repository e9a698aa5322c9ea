"""Who was told that an alert fires hears that it is over when retention deletes its run."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_builders import ADMIN, MSGPACK, api
from builders import Receiver, until
from frames import frame, rows

from perfagent.wire import encode
from perfagent_server.store.retention import DAY_S, Retention, RetentionPolicy


@pytest.mark.parametrize("arrives", [True, False], ids=["firing arrived", "firing is still tried"])
def test_an_open_alert_of_a_run_that_retention_deletes_is_told_to_be_over(tmp_path: Path, arrives: bool) -> None:
    with Receiver(lambda number: 200 if arrives or number > 1 else 503) as receiver, api(
        tmp_path, webhook_allow=(receiver.address,)
    ) as client:  # fmt: skip
        services = client.app.state.services  # type: ignore[attr-defined]
        made = client.post("/api/v1/channels", json={"name": "hook", "url": receiver.url}, headers=ADMIN)
        assert made.status_code == 201, made.text
        sick = frame(1, rows({"loss": [2.0, float("nan")]}, [1, 2]), run="sick")
        assert client.post("/api/v1/ingest", content=encode(sick), headers=MSGPACK | ADMIN).status_code == 200
        until(lambda: receiver.of_type("alert.firing"), why="the alert is told")
        begin = services.started
        later = begin + 40 * DAY_S
        alive = frame(1, rows({"loss": [2.0]}, [1]), run="alive")
        services.database.write(lambda connection: services.store.append_in(connection, [alive], later))
        policy = RetentionPolicy(runs_days=30)
        retention = Retention(
            services.database, services.store, policy, clock=lambda: later, uptime=lambda: later, on_deleted=services.forget
        )  # fmt: skip
        retention.run_once()
        assert client.get("/api/v1/runs/sick", headers=ADMIN).status_code == 404
        services.outbox.wake()
        until(lambda: receiver.of_type("alert.resolved"), why="the receiver hears that it is over")
        [over] = receiver.of_type("alert.resolved")
        firing = receiver.of_type("alert.firing")
        assert {one.json["data"]["alert"]["id"] for one in firing} == {over.json["data"]["alert"]["id"]}
        assert over.json["data"]["evidence"]["resolved"] == "the run was deleted"
        assert receiver.deliveries[-1].json["type"] == "alert.resolved", "it is the last word"
        assert client.get("/api/v1/alerts", headers=ADMIN).json()["alerts"] == []
