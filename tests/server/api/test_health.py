"""What probes ask: /livez is 503 where only a restart helps, and only there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from api_builders import api
from builders import until
from fastapi.testclient import TestClient

from perfagent_server.engine import rules_thread


def statuses(client: TestClient) -> dict[str, int]:
    return {path: client.get(path).status_code for path in ("/healthz", "/livez", "/readyz")}


def test_probes_need_no_key_and_are_200_on_a_server_that_is_well(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        assert statuses(client) == {"/healthz": 200, "/livez": 200, "/readyz": 200}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_rules_have_ended_asks_for_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api(tmp_path) as client:
        engine = client.app.state.services.engine  # type: ignore[attr-defined]

        def ends() -> None:
            raise SystemExit

        monkeypatch.setattr(engine, "_work", ends)
        engine.wake()
        until(lambda: client.get("/livez").status_code == 503, why="the thread of the rules has ended")
        assert statuses(client) == {"/healthz": 200, "/livez": 503, "/readyz": 503}
        assert client.get("/livez").json()["error"]["code"] == "not_well"


def test_a_server_whose_rules_are_stuck_asks_for_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    with api(tmp_path) as client:
        monkeypatch.setattr(rules_thread, "STUCK_S", 1.0)
        monkeypatch.setattr(client.app.state.services.engine, "_work", lambda: may_go_on.wait(60))  # type: ignore[attr-defined]
        until(lambda: client.get("/livez").status_code == 503, why="the thread of the rules does not move")
        may_go_on.set()


def test_a_full_disk_needs_no_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api(tmp_path) as client:
        database = client.app.state.services.database  # type: ignore[attr-defined]
        monkeypatch.setattr(database.backend, "has_room", lambda: False)
        monkeypatch.setattr(database, "full", True)
        assert statuses(client) == {"/healthz": 200, "/livez": 200, "/readyz": 503}
