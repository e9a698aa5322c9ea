"""A06 to A10: what a server, or something that is none, may answer."""

from __future__ import annotations

import logging
import time
from email.utils import formatdate
from itertools import pairwise

import pytest
from builders import until
from faults.accounts import Accounts, pauses, row
from ingest_server import Scripted

from perfagent.wire import Frame

pytestmark = pytest.mark.fault


# ---- A06


@pytest.mark.parametrize(
    ("status", "form"),
    [
        (429, "seconds"),
        (503, "date"),
        pytest.param(503, "seconds", marks=pytest.mark.long),
        pytest.param(429, "date", marks=pytest.mark.long),
    ],
)
def test_a06_the_pause_that_the_server_asks_for_is_kept(fault: Accounts, status: int, form: str) -> None:
    asked = time.time()
    given = "2" if form == "seconds" else formatdate(asked + 3.0, usegmt=True)  # a date has whole seconds
    server = fault.server(Scripted(status=status, headers={"Retry-After": given}))
    sender = fault.sender(server)
    sender.rows.append(row(1))
    until(lambda: len(server.received) >= 2)
    refused, again = server.received[:2]
    assert again - refused >= (1.95 if form == "seconds" else 1.0)
    if form == "date":
        assert time.time() >= asked + 2.0
    until(lambda: sorted(server.values("loss")) == [1])


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("0", 1.0, 1.0),
        ("-86400", 1.0, 1.0),
        ("1e9", 300.0, 300.0),
        ("inf", 300.0, 300.0),
        ("9" * 400, 300.0, 300.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 300.0, 300.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 1.0, 1.0),
        ("nan", 1.0, 30.0),
        ("soon", 1.0, 30.0),
        ("Thu, 99 Foo 2024 99:99:99 GMT", 1.0, 30.0),
        ("", 1.0, 30.0),
    ],
)
def test_a06_absurd_pauses_are_clamped_and_nonsense_is_our_own_schedule(
    fault: Accounts, value: str, least: float, most: float
) -> None:
    server = fault.server(Scripted(status=503, headers={"Retry-After": value}))
    sender = fault.sender(server)
    paused = pauses(sender)
    sender.rows.append(row(1))
    until(lambda: paused)
    assert least - 0.01 <= paused[0] <= most + 0.01
    sender._dispatch()._retry_at = 0.0
    assert sender.flush(10)
    assert sorted(server.values("loss")) == [1]


# ---- A07, A08


def test_a07_frames_are_halved_until_the_server_takes_them_and_one_point_too_many_is_set_aside(
    fault: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    def limit(frame: Frame) -> Scripted | None:
        rows = sum(group.rows for group in frame.groups)
        bad = any(13 in group.steps() and "loss" in group.values for group in frame.groups)
        return Scripted(status=413) if rows > 4 or (bad and rows) else None

    server = fault.server(rule=limit)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server)
        for step in range(32):
            sender.rows.append(row(step))
        sender.event("alert", {"title": "with them"})
        until(lambda: len(server.values("loss")) == 31, within_s=30)
        until(lambda: sender.counters["quarantined_frames"] == 1)
        assert sorted(server.values("loss")) == [s for s in range(32) if s != 13]
        until(lambda: server.events("alert") == [{"title": "with them"}])
        until(lambda: sorted(server.values("lr")) == [*range(32)], why="the other value of that row is not stored")
        assert sender.counters["rejected"] == 1
    (reason,) = [record.message for record in caplog.records]
    assert "status 413" in reason
    assert b"status 413" in (sender.spool.folder / "quarantine").read_bytes()
    sizes = [
        sum(group.rows for group in frame.groups)
        for frame in server.frames
        if any(13 in g.steps() for g in frame.groups)
    ]
    assert all(after <= -(-before // 2) for before, after in pairwise(sizes)), sizes
    until(lambda: server.samples("agent/dropped") == [1.0], why="what was set aside is told nowhere")


@pytest.mark.parametrize("status", [400, 422])
def test_a08_what_is_refused_is_told_once_and_the_rest_goes_on(
    fault: Accounts, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    def first_two(frame: Frame) -> Scripted | None:
        steps = {step for group in frame.groups if "loss" in group.values for step in group.steps()}
        return Scripted(status=status) if steps & {0, 1} else None

    server = fault.server(rule=first_two)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server, flush_s=0.1)
        for step in range(3):
            sender.rows.append(row(step))
            until(lambda step=step: any(step in g.steps() for f in server.frames for g in f.groups))
        assert sender.flush(10)
        assert sorted(server.values("loss")) == [2]
        refused = [frame for frame in server.frames if (frame.source, frame.seq) not in server.stored]
        assert sender.counters["rejected"] == sum(frame.samples for frame in refused)
        assert sender.counters["quarantined_frames"] == len(refused) == 2
        assert len([r for r in caplog.records if f"status {status}" in r.message]) == 1
        assert len({frame.seq for frame in server.frames}) == len(server.frames), "a refused frame was sent again"


def test_a08_what_the_quarantine_has_no_room_for_is_told_as_dropped(
    fault: Accounts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfagent.delivery.spool.QUARANTINE_BYTES", 100)
    server = fault.server(Scripted(status=400))
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server)
        sender.rows.append(row(1))
        until(lambda: sender.counters["quarantined_frames"] == 1)
        until(lambda: caplog.records)
    (told,) = [record.message for record in caplog.records]
    assert "dropped, the quarantine is full" in told
    assert not (sender.spool.folder / "quarantine").read_bytes()
    until(lambda: server.samples("agent/dropped") == [2.0], why="what was dropped is told nowhere")


# ---- A09, A10


@pytest.mark.parametrize("status", [401, 403])
def test_a09_a_wrong_key_is_told_once_with_the_variable_and_samples_are_kept(
    fault: Accounts, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server = fault.server(Scripted(status=status), Scripted(status=status))
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server)
        paused = pauses(sender)
        for attempt in (1, 2):
            sender.rows.append(row(attempt))
            until(lambda attempt=attempt: len(paused) == attempt)
            assert sender.counters["failed"] == attempt
            assert paused[-1] == pytest.approx(60.0)
            until(lambda attempt=attempt: sender.counters["spooled"] == 2 * attempt)
            sender._dispatch()._retry_at = 0.0  # the minute is over
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "PERFAGENT_API_KEY" in caplog.text
        assert sender.flush(10)
        assert sorted(server.values("loss")) == [1, 2]


@pytest.mark.parametrize(
    "answer",
    [
        Scripted(body=b"<html>Log in to the hotel's network</html>"),
        Scripted(status=204, body=b""),
        Scripted(body=b""),
        Scripted(body=b"{}"),
        Scripted(status=302, headers={"Location": "/login"}),
        Scripted(status=404, body=b"nothing here"),
    ],
    ids=["html", "204", "empty", "json", "redirect", "404"],
)
def test_a10_a_foreign_answer_is_no_acknowledgement(
    fault: Accounts, caplog: pytest.LogCaptureFixture, answer: Scripted
) -> None:
    server = fault.server(answer)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server)
        sender.rows.append(row(1))
        until(lambda: sender.counters["failed"] == 1)
        assert sender.counters["acked"] == 0
        assert sender.spool.waiting == 1
        sender._dispatch()._retry_at = 0.0
        assert sender.flush(10)
    assert sorted(server.values("loss")) == [1]
    assert [record.message for record in caplog.records] and all(
        "no perfagent server" in r.message for r in caplog.records
    )
    assert len({frame.seq for frame in server.frames if frame.groups}) == 1


def test_a10_a_redirect_is_never_followed(fault: Accounts) -> None:
    elsewhere = fault.server()
    server = fault.server(Scripted(status=307, headers={"Location": elsewhere.url + "/api/v1/ingest"}))
    sender = fault.sender(server)
    sender.rows.append(row(1))
    until(lambda: sender.counters["failed"] == 1)
    assert elsewhere.frames == []
