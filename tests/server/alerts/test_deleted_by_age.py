"""Who was told that an alert fires hears that it is over when its run is deleted."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from builders import until
from clocks import Clock
from fastapi.testclient import TestClient
from posting import Posts

from perfagent_server.store.retention import DAY_S, Retention, RetentionPolicy


def age(client: TestClient) -> None:
    """Forty days pass, in which another run is alive."""
    services = services_of(client)
    later = services.started + 40 * DAY_S
    services.database.write(lambda c: services.store.append_in(c, [frame({"loss": [2.0]}, run="alive")], later))  # type: ignore[attr-defined]
    Retention(
        services.database, services.store, RetentionPolicy(runs_days=30), clock=lambda: later, uptime=lambda: later,
        on_deleted=services.forget,
    ).run_once()  # fmt: skip


@pytest.mark.parametrize("how", ["by retention", "by hand", "after it was resolved"])
@pytest.mark.parametrize("arrives", [True, False], ids=["firing arrived", "firing is still tried"])
def test_an_alert_of_a_deleted_run_is_told_to_be_over(tmp_path: Path, arrives: bool, how: str) -> None:
    away, clock = [True], Clock(time.time())
    posts = Posts(lambda number: 200 if not away or (arrives and number == 1) else 503)
    with api(tmp_path, send=posts, clocks={"clock": clock}) as client:
        client.post("/api/v1/channels", json={"name": "hook", "url": posts.url}, headers=ADMIN).raise_for_status()
        send(client, frame({"loss": [2.0, float("nan")]}, run="sick"))
        [fired] = until(lambda: posts.of_type("alert.firing"), why="the alert is told")
        if how == "after it was resolved":
            [alert] = client.get("/api/v1/alerts").json()["alerts"]
            client.post(f"/api/v1/alerts/{alert['id']}/resolve").raise_for_status()
        if how == "by retention":
            age(client)
        else:
            assert client.delete("/api/v1/runs/sick", headers=ADMIN).status_code == 204
        assert client.get("/api/v1/runs/sick", headers=ADMIN).status_code == 404
        away.clear()
        clock.at += 60
        services_of(client).outbox.wake()
        until(lambda: "resolved" in posts.arrived, why="the receiver hears that it is over")
        over = posts.deliveries[-1].json
        assert (over["type"], over["data"]["alert"]["id"]) == ("alert.resolved", fired.json["data"]["alert"]["id"])
        assert posts.arrived == [*(["firing"] if arrives else []), "resolved"]
        if how != "after it was resolved":
            assert over["data"]["evidence"]["resolved"] == "the run was deleted"
        assert client.get("/api/v1/alerts", headers=ADMIN).json()["alerts"] == []
