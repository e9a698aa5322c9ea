"""The outbox: every alert arrives, under one id, whoever fails or is killed in between."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import Receiver, free_port
from clocks import Clock
from data_folder import place_of
from engine_bench import NOW
from posting import Posts
from sqlalchemy import insert, select, update

from perfagent.wire import Finding
from perfagent_server.alerts import channels, retries, tables
from perfagent_server.alerts import outbox as outbox_module
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.alerts.retries import DISABLE_AFTER_S, RETRY_AFTER_S, next_try
from perfagent_server.alerts.state_machine import Change
from perfagent_server.database import Database, StorageFull, open_database
from perfagent_server.security.outbound import post
from perfagent_server.settings import Settings
from perfagent_server.store.tables import alert, channel, delivery, run


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = open_database(Settings(**place_of(tmp_path)))
    about = insert(run).values(id="r", project="p", name="gpt", state="running", started=NOW, updated=NOW)
    made.write(lambda connection: connection.execute(about) and None)
    yield made
    made.close()


def add_channel(database: Database, url: str = Posts.url, *, min_severity: str = "warning") -> tuple[str, str]:
    new = channels.NewChannel(name=url, url=url, min_severity=min_severity)
    return database.write(lambda connection: channels.create(connection, new, NOW))


def fire(database: Database, name: str, *, severity: str = "critical", kind: str = "fire", at: float = NOW) -> None:
    found = Finding(rule="nonfinite_loss", severity=severity, message=f"alert {name}", ranks=[0])  # type: ignore[arg-type]
    change = Change(kind, name, found, 1, at)  # type: ignore[arg-type]
    database.write(lambda connection: tables.apply(connection, [("r", change)], at, "http://here/run/{}".format))


def deliveries(database: Database) -> list:
    with database.read() as connection:
        return list(connection.execute(select(delivery).order_by(delivery.c.created)).mappings())


def shown(database: Database) -> dict:
    with database.read() as connection:
        return {row["id"]: row for row in channels.all_channels(connection)}


def send_all(database: Database, posts: Posts, *, looks: int = 100) -> Clock:
    """An outbox looks whenever something is due, until nothing waits; its clock."""
    clock = Clock(NOW)
    outbox = Outbox(database, ["127.0.0.0/8"], clock=clock, send=posts)
    for _ in range(looks):
        outbox.send_due()
        waiting = [row["due"] for row in deliveries(database) if row["state"] == "waiting"]
        if not waiting:
            break
        clock.at = min((due for due in waiting if due > clock.at), default=clock.at)
    return clock


def test_sent_delivery_is_not_sent_again_before_its_outcome(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_UNWRITTEN_S", 0.0)
    write_down, failures = retries.write_down, [5]

    def fails_at_first(*given: object) -> None:
        if failures[0]:
            failures[0] -= 1
            raise StorageFull("the disk is full")
        write_down(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(retries, "write_down", fails_at_first)
    add_channel(database)
    fire(database, "al_1")
    posts = Posts()
    outbox = Outbox(database, clock=Clock(NOW), send=posts)
    assert (outbox.send_due(), outbox.send_due(), len(posts.deliveries)) == (1, 0, 1)
    assert (outbox.counters["failures"], deliveries(database)[0]["state"]) == (5, "delivered")


def test_what_was_in_the_air_at_a_kill_comes_again_under_its_id(database: Database) -> None:
    entered, may_end = threading.Event(), threading.Event()

    def hangs(_count: int) -> int:
        entered.set()
        may_end.wait(60)
        return 200

    add_channel(database)
    fire(database, "al_1")
    killed, next_server = Posts(hangs), Posts()
    thread = threading.Thread(target=lambda: Outbox(database, clock=Clock(NOW), send=killed).send_due(), daemon=True)
    thread.start()
    assert entered.wait(20)
    send_all(database, next_server)
    may_end.set()
    thread.join(20)
    [got], [again] = killed.deliveries, next_server.deliveries
    assert got.headers["webhook-id"] == again.headers["webhook-id"] == deliveries(database)[0]["id"]


def test_only_channels_that_want_the_severity_are_told(database: Database) -> None:
    """An alert that became critical is told once more, and is new to who asked for what is critical alone."""
    levels = {
        add_channel(database, f"https://{one}.example/", min_severity=one)[0]: one
        for one in ("info", "warning", "critical")
    }
    for name, severity in (("al_i", "info"), ("al_w", "warning"), ("al_c", "critical")):
        fire(database, name, severity=severity)

    def told(name: str) -> list[str]:
        return sorted(levels[row["channel"]] for row in deliveries(database) if row["alert"] == name)

    assert [told(name) for name in ("al_i", "al_w", "al_c")] == [
        ["info"],
        ["info", "warning"],
        ["critical", "info", "warning"],
    ]
    for severity in ("critical", "critical", "warning", "critical"):
        fire(database, "al_w", severity=severity, kind="update")
    assert told("al_w") == ["critical", "info", "info", "warning", "warning"]


def test_resolved_comes_once_after_firing_to_those_who_were_told(database: Database) -> None:
    posts = Posts(lambda count: 500 if count <= 2 else 200)
    add_channel(database)
    fire(database, "al_1")
    for kind in ("resolve", "reopen", "resolve"):
        fire(database, "al_1", kind=kind)
    add_channel(database, "https://new.example/")
    fire(database, "al_1", kind="resolve")
    send_all(database, posts)
    assert [got.json["type"] for got in posts.deliveries] == ["alert.firing"] * 3 + ["alert.resolved"]
    assert set(posts.urls) == {Posts.url}


@pytest.mark.fault
def test_w04_gone_disables_the_channel_and_another_is_told(database: Database) -> None:
    gone, _ = add_channel(database, "https://gone.example/")
    add_channel(database, "https://there.example/", min_severity="critical")
    fire(database, "al_1", severity="warning")
    posts = Posts(lambda count: 410 if count == 1 else 200)
    send_all(database, posts)
    assert posts.urls == ["https://gone.example/", "https://there.example/"]
    assert posts.arrived == ["channel.disabled"]
    assert (shown(database)[gone]["enabled"], "410" in shown(database)[gone]["disabled_reason"]) == (False, True)


@pytest.mark.fault
def test_w04_five_days_of_failures_disable_a_channel(database: Database) -> None:
    name, _ = add_channel(database, "https://dead.example/")
    other, _ = add_channel(database, "https://other.example/", min_severity="critical")
    fire(database, "al_1", severity="warning")
    clock, times, dues = Clock(NOW), [NOW], list[float]()
    posts = Posts(lambda _: times.append(clock.at) or 500)  # type: ignore[func-returns-value]
    outbox = Outbox(database, clock=clock, send=posts)
    while outbox.send_due() and deliveries(database)[0]["state"] == "waiting":
        dues.append(deliveries(database)[0]["due"])
        clock.at = dues[-1]
    waits = [due - tried for due, tried in zip(dues, times[1:], strict=False)]
    assert len(waits) == len(RETRY_AFTER_S) and sum(RETRY_AFTER_S) > 4 * 86400
    assert waits[0] <= waits[1] <= 5.0
    assert all(0.8 * planned <= wait <= 1.2 * planned for wait, planned in zip(waits, RETRY_AFTER_S, strict=True))
    fire(database, "al_2", severity="warning", at=clock.at)
    clock.at = NOW + DISABLE_AFTER_S + 3600
    outbox.send_due()
    assert not shown(database)[name]["enabled"]
    assert "5 days" in shown(database)[name]["disabled_reason"]
    assert [row["event"] for row in deliveries(database) if row["channel"] == other] == ["channel.disabled"]


@pytest.mark.fault
@pytest.mark.sql
def test_w04_receiver_back_after_three_days_gets_everything(database: Database) -> None:
    add_channel(database)
    fire(database, "al_1")
    clock = send_all(database, Posts(lambda _: 503), looks=14)
    assert clock.at > NOW + 3600
    assert deliveries(database)[0]["tries"] > 8
    clock.at = NOW + 72 * 3600
    database.write(lambda connection: connection.execute(update(delivery).values(due=clock.at + 3600)) and None)
    fire(database, "al_2", at=clock.at)
    posts = Posts()
    outbox = Outbox(database, clock=clock, send=posts)
    outbox.send_due()
    outbox.send_due()
    alerts = [got.json["data"]["alert"]["id"] for got in posts.deliveries]
    assert alerts == ["al_2", "al_1"], "what failed is sent as soon as the receiver is back"


def _reset(request: socket.socket) -> None:
    request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _says(answer: bytes) -> Callable[[socket.socket], None]:
    return lambda request: request.sendall(answer)


WRONG = {
    "reset": _reset,
    "another protocol": _says(b"\x15\x03\x01\x00\x02\x02\x46"),
    "closed": lambda request: request.shutdown(socket.SHUT_RDWR),
    "302": _says(b"HTTP/1.1 302 Found\r\nLocation: /other\r\n\r\n"),
    "429": _says(b"HTTP/1.1 429 Too Many\r\nRetry-After: 0\r\n\r\n"),
    "body that never comes": _says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"),
}


@pytest.mark.real
@pytest.mark.fault
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_w01_whatever_a_receiver_does_wrong_alerts_come_again(
    database: Database, wrong: Callable[[socket.socket], None]
) -> None:
    port, clock = free_port(), Clock(NOW)
    add_channel(database, f"http://127.0.0.1:{port}/hook")
    fire(database, "al_1")
    outbox = Outbox(database, ["127.0.0.0/8"], clock=clock, send=post)

    def answers(listener: socket.socket) -> None:
        request, _ = listener.accept()
        with request, contextlib.suppress(OSError):
            request.recv(65536)
            wrong(request)

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=answers, args=(listener,), daemon=True)
        thread.start()
        outbox.send_due()
        thread.join(10)
    with Receiver(port=port) as receiver:
        clock.at += 10
        outbox.send_due()
        ids = {one.headers["webhook-id"] for one in receiver.deliveries}
    [row] = deliveries(database)
    assert row["state"] == "delivered"
    # a 200 counts, whatever becomes of its body
    assert ids == {row["id"]} or (row["tries"] == 1 and row["status"] == 200)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("30", 30, 30),
        ("999999999", 21600, 21600),
        ("Wed, 15 Nov 2023 00:00:00 GMT", 6400, 6400),
        ("soon", 0, 1),
        ("²", 0, 1),
        ("Wed, 01 Jan 999999 00:00:00 GMT", 0, 1),
        ("nan", 0, 1),
        (None, 0, 1),
    ],
)
def test_w01_retry_after_is_honored_within_reason(header: str | None, least: float, most: float) -> None:
    due = next_try(1, NOW, header)
    assert due is not None
    assert least <= due - NOW <= most


def test_a_channel_without_a_secret_sends_nothing_unsigned(database: Database) -> None:
    add_channel(database)
    database.write(lambda connection: connection.execute(channel.update().values(secret=" ")) and None)
    fire(database, "al_1")
    posts = Posts()
    send_all(database, posts, looks=1)
    assert "no secret" in deliveries(database)[0]["error"]
    assert posts.deliveries == []


def test_a_refused_address_is_the_error_of_its_delivery(database: Database) -> None:
    add_channel(database, "http://127.0.0.1:9/hook")
    fire(database, "al_1")
    Outbox(database, clock=Clock(NOW), send=post).send_due()
    assert "address not allowed" in deliveries(database)[0]["error"]


@pytest.mark.sql
def test_a_deleted_channel_takes_its_deliveries_along(database: Database) -> None:
    name, _ = add_channel(database)
    fire(database, "al_1")
    removed = [database.write(lambda connection: channels.remove(connection, name)) for _ in range(2)]
    assert (removed, deliveries(database)) == ([True, False], [])
    with database.read() as connection:
        assert len(connection.execute(select(alert)).all()) == 1
