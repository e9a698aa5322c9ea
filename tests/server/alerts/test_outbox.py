"""The outbox with real receivers: every alert arrives, under one id, whoever fails or is killed in between."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpcore
import pytest
from builders import Receiver, free_port, until
from clocks import Clock
from data_folder import place_of
from engine_bench import NOW
from sqlalchemy import insert, select, update
from standardwebhooks import Webhook

from perfagent.wire import Finding
from perfagent_server.alerts import channels, retries, tables
from perfagent_server.alerts import outbox as outbox_module
from perfagent_server.alerts.batches import Batch
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.alerts.retries import DISABLE_AFTER_S, RETRY_AFTER_S, next_try
from perfagent_server.alerts.state_machine import Change
from perfagent_server.database import Database, StorageFull, open_database
from perfagent_server.security.outbound import Guard, Reply
from perfagent_server.settings import Settings
from perfagent_server.store.tables import alert, channel, delivery, run


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = open_database(Settings(**place_of(tmp_path)))
    made.write(
        lambda connection: connection.execute(
            insert(run).values(id="r", project="p", name="gpt", state="running", started=NOW, updated=NOW)
        )
    )
    yield made
    made.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try that failed is made again at once: for what comes of a try. The schedule has a test of its own."""
    monkeypatch.setattr("perfagent_server.alerts.retries.RETRY_AFTER_S", (0.02,) * len(RETRY_AFTER_S))


def add_channel(database: Database, url: str, *, min_severity: str = "warning") -> tuple[str, str]:
    new = channels.NewChannel(name=url, url=url, min_severity=min_severity)
    return database.write(lambda connection: channels.create(connection, new, NOW))


def fire(database: Database, name: str, *, severity: str = "critical", kind: str = "fire", at: float = NOW) -> None:
    found = Finding(rule="nonfinite_loss", severity=severity, message=f"alert {name}", ranks=[0])  # type: ignore[arg-type]
    change = Change(kind, name, found, 1, at)  # type: ignore[arg-type]
    database.write(lambda connection: tables.apply(connection, [("r", change)], at, "http://here/run/{}".format))


def deliveries(database: Database) -> list:
    with database.read() as connection:
        return list(connection.execute(select(delivery).order_by(delivery.c.created)).mappings())


@contextlib.contextmanager
def running(database: Database, **options: object) -> Iterator[Outbox]:
    outbox = Outbox(database, ["127.0.0.0/8"], **options)  # type: ignore[arg-type]
    outbox.start()
    try:
        yield outbox
    finally:
        outbox.stop()


def test_an_alert_arrives_signed_with_the_body_of_the_interface(database: Database, receiver: Receiver) -> None:
    _, secret = add_channel(database, receiver.url)
    fire(database, "al_1")
    with running(database):
        until(lambda: receiver.deliveries)
    [got] = receiver.deliveries
    Webhook(secret).verify(got.body, got.headers)
    assert got.json["type"] == "alert.firing"
    assert got.json["data"]["alert"]["id"] == "al_1"
    assert got.json["data"]["url"] == "http://here/run/r"
    assert got.headers["webhook-id"] == deliveries(database)[0]["id"]


def test_what_was_sent_is_not_sent_again_while_its_outcome_cannot_be_written(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_UNWRITTEN_S", 0.02)
    write_down, failures = retries.write_down, [5]

    def fails_at_first(*given: object) -> None:
        if failures[0]:
            failures[0] -= 1
            raise StorageFull("the disk is full")
        write_down(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(retries, "write_down", fails_at_first)
    add_channel(database, receiver.url)
    fire(database, "al_1")
    with running(database) as outbox:
        until(lambda: deliveries(database)[0]["state"] == "delivered")
        assert outbox.counters["failures"] == 5
    assert len(receiver.deliveries) == 1


@pytest.mark.fault
def test_w01_a_receiver_that_fails_every_third_request_gets_each_alert_under_one_id(
    database: Database, soon: None
) -> None:
    with Receiver(lambda count: 500 if count % 3 == 0 else 200) as receiver:
        _, secret = add_channel(database, receiver.url)
        for number in range(30):
            fire(database, f"al_{number}")
        with running(database):
            until(lambda: all(row["state"] == "delivered" for row in deliveries(database)), within_s=60)
        ids: dict[str, set[str]] = {}
        for got in receiver.deliveries:
            Webhook(secret).verify(got.body, got.headers)
            ids.setdefault(got.json["data"]["alert"]["id"], set()).add(got.headers["webhook-id"])
        assert set(ids) == {f"al_{number}" for number in range(30)}
        assert all(len(found) == 1 for found in ids.values())
        accepted = [got.headers["webhook-id"] for got in receiver.deliveries if got.status == 200]
        assert len(accepted) == len(set(accepted)) == 30  # what was accepted is not sent again


SENDER = """
import sys
from pathlib import Path
from perfagent_server.alerts.batches import Batch
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.database import open_database
from perfagent_server.settings import Settings
outbox = Outbox(open_database(Settings(data=Path(sys.argv[1]), database=sys.argv[2] or None)), ["127.0.0.0/8"])
outbox.start()
sys.stdin.read()
"""


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_server_killed_again_and_again_loses_no_delivery_and_changes_no_id(
    tmp_path: Path, soon: None, kills: int
) -> None:
    settings = Settings(**place_of(tmp_path))
    with Receiver(lambda count: 503 if count % 3 == 0 else 200) as receiver:
        database = open_database(settings)
        database.write(
            lambda connection: connection.execute(
                insert(run).values(id="r", project="p", name="g", state="running", started=NOW, updated=NOW)
            )
        )
        add_channel(database, receiver.url)
        for number in range(40):
            fire(database, f"al_{number}")
        database.close()
        for kill in range(1, kills + 1):
            process = subprocess.Popen(
                [sys.executable, "-c", SENDER, str(tmp_path), settings.database or ""],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            enough = min(40, kill * 6)
            until(lambda enough=enough: len(receiver.deliveries) >= enough, within_s=60)  # type: ignore[misc]
            process.kill()
            assert process.wait(10) == -signal.SIGKILL
            assert process.stdin is not None
            process.stdin.close()
        database = open_database(settings)
        try:
            with running(database):
                until(lambda: all(row["state"] == "delivered" for row in deliveries(database)), within_s=60)
        finally:
            database.close()
        ids: dict[str, set[str]] = {}
        for got in receiver.deliveries:
            if len(got.body) == int(got.headers["content-length"]):  # else we were killed in the middle of it
                ids.setdefault(got.json["data"]["alert"]["id"], set()).add(got.headers["webhook-id"])
        assert set(ids) == {f"al_{number}" for number in range(40)}
        assert all(len(found) == 1 for found in ids.values())


def test_a_dead_receiver_does_not_delay_a_healthy_one(database: Database, receiver: Receiver) -> None:
    hang = threading.Event()
    add_channel(database, "http://127.0.0.1:9/dead")
    add_channel(database, receiver.url)
    from perfagent_server.security.outbound import post

    def send(guard: Guard, url: str, body: bytes, headers: dict[str, str]) -> Reply:
        if url.endswith("/dead"):
            hang.wait(30)
            raise httpcore.ConnectTimeout("dead")
        return post(guard, url, body, headers)

    for number in range(20):
        fire(database, f"al_{number}")
    with running(database, send=send):
        until(lambda: len(receiver.deliveries) == 20)
        until(lambda: [row["state"] for row in deliveries(database)].count("delivered") == 20)
        assert [row["state"] for row in deliveries(database)].count("waiting") == 20
        hang.set()


def test_only_channels_that_want_the_severity_are_told(database: Database) -> None:
    everything, _ = add_channel(database, "https://a.example/", min_severity="info")
    usual, _ = add_channel(database, "https://b.example/")
    worst, _ = add_channel(database, "https://c.example/", min_severity="critical")
    for name, severity in (("al_i", "info"), ("al_w", "warning"), ("al_c", "critical")):
        fire(database, name, severity=severity)
    found = sorted((row["alert"], row["channel"]) for row in deliveries(database))
    assert found == sorted(
        [
            ("al_i", everything),
            ("al_w", everything),
            ("al_w", usual),
            ("al_c", everything),
            ("al_c", usual),
            ("al_c", worst),
        ]
    )


def test_an_alert_that_became_critical_is_told_once_more_and_new_to_who_asked_for_that(database: Database) -> None:
    any_of_them, _ = add_channel(database, "https://a.example/")
    worst, _ = add_channel(database, "https://b.example/", min_severity="critical")
    fire(database, "al_1", severity="warning")
    for severity in ("critical", "critical", "warning", "critical"):
        fire(database, "al_1", severity=severity, kind="update")
    assert sorted(row["channel"] for row in deliveries(database)) == sorted([any_of_them, any_of_them, worst])


def test_resolved_is_sent_once_after_firing_and_only_to_those_who_were_told(
    database: Database, receiver: Receiver
) -> None:
    add_channel(database, receiver.url)
    fire(database, "al_1")
    for kind in ("resolve", "reopen", "resolve"):
        fire(database, "al_1", kind=kind)
    add_channel(database, "http://127.0.0.1:9/new")
    fire(database, "al_1", kind="resolve")
    with running(database):
        until(lambda: len(receiver.deliveries) == 2)
    assert [got.json["type"] for got in receiver.deliveries] == ["alert.firing", "alert.resolved"]
    assert len({got.json["data"]["alert"]["id"] for got in receiver.deliveries}) == 1


def test_resolved_waits_until_firing_has_arrived(database: Database, soon: None) -> None:
    with Receiver(lambda count: 500 if count <= 2 else 200) as receiver:
        add_channel(database, receiver.url)
        fire(database, "al_1")
        fire(database, "al_1", kind="resolve")
        with running(database):
            until(lambda: all(row["state"] == "delivered" for row in deliveries(database)), within_s=30)
        assert [got.json["type"] for got in receiver.deliveries] == ["alert.firing"] * 3 + ["alert.resolved"]


@pytest.mark.fault
def test_w04_gone_disables_the_channel_and_another_is_told(database: Database, receiver: Receiver) -> None:
    with Receiver(lambda _: 410) as gone:
        name, _ = add_channel(database, gone.url)
        add_channel(database, receiver.url)
        fire(database, "al_1")
        with running(database):
            until(lambda: receiver.of_type("channel.disabled"))
        assert len(gone.deliveries) == 1
    with database.read() as connection:
        shown = {row["id"]: row for row in channels.all_channels(connection)}
    assert not shown[name]["enabled"]
    assert "410" in shown[name]["disabled_reason"]


def _advance(database: Database, clock: Clock, answer: Callable[[], int], rounds: int) -> list[float]:
    """Drives an outbox by hand: one try whenever one is due; the waits between them."""
    outbox = Outbox(database, clock=clock, send=lambda *_: Reply(answer(), {}))
    waits = []
    for _ in range(rounds):
        [row] = [
            one for one in deliveries(database) if one["state"] == "waiting" and one["event"] == "alert.firing"
        ] or [None]
        if row is None:
            break
        waits.append(max(0.0, row["due"] - clock.at))
        clock.at = max(clock.at, row["due"])
        with database.read() as connection:
            receiver = connection.execute(select(channel).where(channel.c.id == row["channel"])).mappings().one()
        outbox._deliver(Batch(receiver, [row]))
    return waits


@pytest.mark.fault
def test_w04_tries_follow_the_schedule_and_the_channel_is_disabled_after_five_days(database: Database) -> None:
    name, _ = add_channel(database, "https://dead.example/")
    other, _ = add_channel(database, "https://other.example/", min_severity="critical")
    clock = Clock(NOW)
    fire(database, "al_1", severity="warning")
    waits = _advance(database, clock, lambda: 500, 50)
    assert waits[0] == 0.0
    assert waits[1] <= waits[2] <= 5.0
    assert len(waits) == len(RETRY_AFTER_S) + 1
    assert sum(RETRY_AFTER_S) > 4 * 86400
    # jitter
    assert all(0.8 * planned <= wait <= 1.2 * planned for wait, planned in zip(waits[1:], RETRY_AFTER_S, strict=True))
    fire(database, "al_2", severity="warning", at=clock.at)
    clock.at = NOW + DISABLE_AFTER_S + 3600
    _advance(database, clock, lambda: 500, 1)
    with database.read() as connection:
        shown = {row["id"]: row for row in channels.all_channels(connection)}
    assert not shown[name]["enabled"]
    assert "5 days" in shown[name]["disabled_reason"]
    assert [(row["event"], row["channel"]) for row in deliveries(database) if row["channel"] == other] == [
        ("channel.disabled", other)
    ]


def test_a_clock_that_jumps_ahead_disables_no_channel(database: Database) -> None:
    name, _ = add_channel(database, "https://fails.example/")
    clock = Clock(NOW)
    fire(database, "al_1", severity="warning")
    _advance(database, clock, lambda: 500, 3)
    database.write(lambda connection: connection.execute(update(delivery).values(state="failed")))
    fire(database, "al_2", severity="warning", at=clock.at)
    clock.at += DISABLE_AFTER_S + 3600
    _advance(database, clock, lambda: 500, 3)
    with database.read() as connection:
        [shown] = [row for row in channels.all_channels(connection) if row["id"] == name]
    assert shown["enabled"]


@pytest.mark.fault
def test_w04_an_alert_after_seventy_two_hours_of_a_receivers_absence_is_still_there(database: Database) -> None:
    add_channel(database, "https://away.example/")
    clock = Clock(NOW)
    fire(database, "al_1")
    _advance(database, clock, lambda: 200 if clock.at > NOW + 72 * 3600 else 503, 50)
    [row] = deliveries(database)
    assert row["state"] == "delivered"
    assert row["tries"] > 8


def _reset(request: socket.socket) -> None:
    """The message is read, and the connection reset instead of an answer."""
    request.recv(65536)
    request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _garbage(request: socket.socket) -> None:
    """What a server for another protocol answers."""
    request.recv(65536)
    request.sendall(b"\x15\x03\x01\x00\x02\x02\x46")


def _answer(head: bytes) -> Callable[[socket.socket], None]:
    def answer(request: socket.socket) -> None:
        request.recv(65536)
        request.sendall(b"HTTP/1.1 " + head + b"\r\n\r\n")

    return answer


@pytest.mark.fault
@pytest.mark.parametrize(
    "wrong",
    [
        _reset, _garbage, lambda request: request.shutdown(socket.SHUT_RDWR), _answer(b"302 Found\r\nLocation: /other"),
        _answer(b"429 Too Many\r\nRetry-After: 0"), _answer(b"503 Busy"), _answer(b"200 OK\r\nContent-Length: 10"),
    ],
    ids=["reset after it was read", "another protocol", "closed", "302", "429", "503", "body that never comes"],
)  # fmt: skip
def test_w01_whatever_a_receiver_does_wrong_the_alert_comes_again_under_its_id(
    database: Database, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr(retries, "RETRY_AFTER_S", (0.02,) * 10_000)  # tries go on until the receiver listens
    port = free_port()
    add_channel(database, f"http://127.0.0.1:{port}/hook")
    with socket.create_server(("127.0.0.1", port), reuse_port=False) as listener:
        fire(database, "al_1")
        with running(database):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                wrong(connection)
            listener.close()
            with Receiver(port=port) as receiver:
                until(lambda: receiver.deliveries or _all_delivered(database), within_s=20)
                until(lambda: _all_delivered(database), within_s=20)
                ids = {one.headers["webhook-id"] for one in receiver.deliveries}
    [row] = deliveries(database)
    # a 200 counts, whatever becomes of its body
    assert ids == {row["id"]} or (row["tries"] == 1 and row["status"] == 200)


def _all_delivered(database: Database) -> bool:
    return all(row["state"] == "delivered" for row in deliveries(database))


@pytest.mark.sql
def test_what_failed_is_sent_as_soon_as_its_receiver_is_back(database: Database) -> None:
    add_channel(database, "https://away.example/")
    clock = Clock(NOW)
    fire(database, "al_1")
    _advance(database, clock, lambda: 503, 12)
    [row] = deliveries(database)
    assert row["due"] - clock.at > 3600
    fire(database, "al_2", at=clock.at)
    outbox = Outbox(database, clock=clock, send=lambda *_: Reply(200, {}))
    second = next(one for one in deliveries(database) if one["alert"] == "al_2")
    with database.read() as connection:
        receiver = connection.execute(select(channel).where(channel.c.id == second["channel"])).mappings().one()
    outbox._deliver(Batch(receiver, [second]))
    first = next(one for one in deliveries(database) if one["alert"] == "al_1")
    assert (first["state"], first["due"]) == ("waiting", 0.0)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("30", 30, 30),
        ("999999999", 21600, 21600),
        ("Wed, 15 Nov 2023 00:00:00 GMT", 6400, 6400),
        ("soon", 0, 1),
        ("-5", 0, 1),
        ("²", 0, 1),
        ("Wed, 01 Jan 999999 00:00:00 GMT", 0, 1),
        ("Wed, 01 Jan 999999999999999999999 00:00:00 GMT", 0, 1),
        ("Wed, 21 Oct 2015 07:28:00 -99999999999999", 0, 1),
        ("nan", 0, 1),
        (None, 0, 1),
    ],
)
def test_w01_retry_after_is_honored_within_reason(header: str | None, least: float, most: float) -> None:
    due = next_try(1, NOW, header)
    assert due is not None
    assert least <= due - NOW <= most


def test_a_try_that_fails_in_a_way_nobody_foresaw_is_a_failed_try_and_waits_for_the_next(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "perfagent.server")  # pytest's workers cannot hand over what this one says
    add_channel(database, "https://odd.example/")
    fire(database, "al_1")
    tried: list[float] = []

    def send(guard: Guard, url: str, body: bytes, headers: dict[str, str]) -> Reply:
        tried.append(1.0)
        raise TypeError("a header of \udce4\0")

    clock = Clock(NOW)  # stands still: the next try never becomes due
    with running(database, send=send, clock=clock):
        until(lambda: deliveries(database)[0]["tries"] == 1)
    [row] = deliveries(database)
    assert (len(tried), row["state"]) == (1, "waiting")
    assert row["error"] == "the server failed on this delivery: TypeError: a header of ?"
    assert row["due"] > NOW


def test_a_channel_without_a_secret_sends_nothing_unsigned(database: Database, receiver: Receiver) -> None:
    name, _ = add_channel(database, receiver.url)
    blank = channel.update().where(channel.c.id == name).values(secret=" ")
    database.write(lambda connection: connection.execute(blank) and None)
    fire(database, "al_1")
    with running(database):
        until(lambda: deliveries(database)[0]["tries"] >= 1)
    assert "no secret" in deliveries(database)[0]["error"]
    assert receiver.deliveries == []


def test_a_receiver_inside_the_network_is_refused_and_the_cause_is_in_the_row(
    database: Database, receiver: Receiver
) -> None:
    add_channel(database, receiver.url)
    fire(database, "al_1")
    outbox = Outbox(database)
    outbox.start()
    try:
        until(lambda: deliveries(database)[0]["tries"] >= 1)
    finally:
        outbox.stop()
    assert "address not allowed" in deliveries(database)[0]["error"]
    assert receiver.deliveries == []


@pytest.mark.sql
def test_a_deleted_channel_takes_its_deliveries_along(database: Database) -> None:
    name, _ = add_channel(database, "https://a.example/")
    fire(database, "al_1")
    assert database.write(lambda connection: channels.remove(connection, name))
    assert not database.write(lambda connection: channels.remove(connection, name))
    assert deliveries(database) == []
    with database.read() as connection:
        assert len(connection.execute(select(alert)).all()) == 1
