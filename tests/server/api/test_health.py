"""What probes ask: /livez is 503 where only a restart helps, and only there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from api_builders import api, frame, send, services_of
from builders import until
from clocks import Clock
from fastapi.testclient import TestClient


def statuses(client: TestClient) -> list[int]:
    return [client.get(path).status_code for path in ("/healthz", "/livez", "/readyz")]


def test_probes_need_no_key_and_a_full_disk_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api(tmp_path, auth="required") as client:
        assert statuses(client) == [200, 200, 200]
        database = services_of(client).database
        monkeypatch.setattr(database.backend, "has_room", lambda: False)
        monkeypatch.setattr(database, "full", True)
        assert statuses(client) == [200, 200, 503]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["ended", "stuck"])
def test_rules_that_have_ended_or_are_stuck_ask_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    clock, reached, may_go_on = Clock(1000.0), threading.Event(), threading.Event()
    with api(tmp_path, clocks={"monotonic": clock}) as client:

        def since(*_: object, **__: object) -> list[object]:
            """What the thread of the rules reads."""
            reached.set()
            if how == "ended":
                raise SystemExit
            may_go_on.wait(60)
            return []

        monkeypatch.setattr(services_of(client).store, "since", since)
        send(client, frame({"loss": [1.0]}))
        assert reached.wait(20)
        if how == "stuck":
            clock.at += 120.0
            assert statuses(client) == [200, 200, 503]
            clock.at += 0.1
        until(lambda: client.get("/livez").status_code == 503)
        assert statuses(client) == [200, 503, 503]
        assert client.get("/livez").json()["error"]["code"] == "not_well"
        may_go_on.set()
