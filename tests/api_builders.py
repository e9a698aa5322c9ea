"""A server for tests of the API: in process for most, behind a real uvicorn and a real socket where those matter."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from builders import until, web
from data_folder import place_of
from fastapi import FastAPI
from fastapi.testclient import TestClient

from perfagent.wire import Event, Frame, Group, encode
from perfagent_server.alerts.senders import Post
from perfagent_server.app import create_app
from perfagent_server.security.outbound import post
from perfagent_server.services import Services, open_services
from perfagent_server.serving import make_server
from perfagent_server.settings import Settings

ADMIN_TOKEN = "an-admin-token-of-the-tests"
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
MSGPACK = {"Content-Type": "application/x-msgpack"}


def settings_for(folder: Path, **changes: Any) -> Settings:
    return Settings(**{**place_of(folder / "server-data"), "admin_token": ADMIN_TOKEN, **changes})


@contextlib.contextmanager
def api(
    folder: Path, *, base_url: str = "http://127.0.0.1:8420", dashboard: bool = False,
    clocks: Mapping[str, Callable[[], float]] | None = None, send: Post = post, **changes: Any,
) -> Iterator[TestClient]:  # fmt: skip
    """The app in this process, started, with a database of its own. Services: `services_of(client)`. clocks: `clock`,
    `monotonic`, or both. send: where messages to channels go, as tests/posting.py."""
    settings = settings_for(folder, **changes)
    services = open_services(settings, send=send, **(clocks or {})) if clocks or send is not post else None
    app = create_app(settings, dashboard=dashboard, services=services)
    with TestClient(app, base_url=base_url, follow_redirects=False) as client:
        yield client


def services_of(client: TestClient) -> Services:
    """The parts of the server behind a client of `api`."""
    found: Services = client.app.state.services  # type: ignore[attr-defined]
    return found


@dataclass
class Listening:
    """A server on a real socket. `stop` ends it as a signal would."""

    app: FastAPI
    settings: Settings
    server: uvicorn.Server
    thread: threading.Thread

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.settings.port

    def take(self, *sent: Frame) -> None:
        for one in sent:
            web().post(f"{self.url}/api/v1/ingest", content=encode(one), headers=MSGPACK).raise_for_status()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=30)
        assert not self.thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def listening(folder: Path, *, dashboard: bool = False, **changes: Any) -> Iterator[Listening]:
    bound = socket.create_server(("127.0.0.1", 0))
    settings = replace(settings_for(folder, **changes), port=bound.getsockname()[1])
    app = create_app(settings, dashboard=dashboard)
    server = make_server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    running = Listening(app, settings, server, thread)
    try:
        until(lambda: server.started or not thread.is_alive(), why="the server did not start")
        assert server.started, "the server ended at its start"
        yield running
    finally:
        running.stop()
        bound.close()


def frame(
    values: Mapping[str, Sequence[float]], *, run: str = "r1", seq: int = 1, rank: int = 0, first_step: int = 1,
    events: Sequence[Event] = (), project: str = "p", source: str | None = None, attempt: int = 1, name: str | None = None,
) -> Frame:  # fmt: skip
    """One frame whose columns begin at first_step, a second apart."""
    rows = max((len(column) for column in values.values()), default=0)
    steps = list(range(first_step, first_step + rows))
    times = [1_700_000_000.0 + step for step in steps]
    groups = [
        Group(step=steps, time=times, monotonic=times, values={name: list(column) for name, column in values.items()})
    ]
    return Frame(
        project=project, run=run, source=source or f"{run}-{attempt}-{rank}", attempt=attempt, rank=rank, seq=seq,
        groups=groups if rows else [], events=list(events), name=name,
    )  # fmt: skip


def send(client: TestClient, sent: Frame, **headers: str) -> dict[str, Any]:
    answer = client.post("/api/v1/ingest", content=encode(sent), headers={**MSGPACK, **headers})
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply
