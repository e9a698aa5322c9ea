"""A06 to A10: what a server, or something that is none, may answer. What a reply means is in
tests/agent/delivery/test_judge.py; trainings with such servers are in test_training.py."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest
from builders import until
from driven_sender import Driven, steps_in
from faults.accounts import row
from ingest_server import Scripted
from recording_transport import RecordingTransport

from perfagent.delivery.transport import Reply
from perfagent.wire import Frame

pytestmark = pytest.mark.fault


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "perfagent")


@pytest.mark.real
def test_a07_frames_are_halved_down_to_the_one_point_too_many(fault, caplog):
    def limit(frame: Frame) -> Scripted | None:
        rows = sum(group.rows for group in frame.groups)
        bad = any(13 in group.steps() and "loss" in group.values for group in frame.groups)
        return Scripted(status=413) if rows > 4 or (bad and rows) else None

    server = fault.server(rule=limit)
    sender = fault.sender(server)
    sender.rows.extend(row(step) for step in range(32))
    sender.event("alert", {"title": "with them"})
    until(lambda: sender.counters["quarantined_frames"] == 1 and len(server.values("loss")) == 31, within_s=30)
    until(lambda: server.samples("agent/dropped") == [1.0], why="what was set aside is told nowhere")
    assert sorted(server.values("loss")) == [s for s in range(32) if s != 13]
    assert server.events("alert") == [{"title": "with them"}]
    assert sorted(server.values("lr")) == [*range(32)], "the other value of that row is not stored"
    assert sender.counters["rejected"] == 1
    (reason,) = [record.message for record in caplog.records]
    assert "status 413" in reason
    assert b"status 413" in (sender.spool.folder / "quarantine").read_bytes()
    sizes = [sum(g.rows for g in f.groups) for f in server.frames if any(13 in g.steps() for g in f.groups)]
    assert all(after <= -(-before // 2) for before, after in pairwise(sizes)), sizes


@pytest.mark.real
def test_a08_refused_frames_are_told_once_and_the_rest_goes_on(fault, caplog):
    def first_two(frame: Frame) -> Scripted | None:
        steps = {step for group in frame.groups if "loss" in group.values for step in group.steps()}
        return Scripted(status=422) if steps & {0, 1} else None

    server = fault.server(rule=first_two)
    sender = fault.sender(server, flush_s=0.1)
    for step in range(3):
        sender.rows.append(row(step))
        until(lambda step=step: any(step in g.steps() for f in server.frames for g in f.groups))
    assert sender.flush(10)
    assert sorted(server.values("loss")) == [2]
    refused = [frame for frame in server.frames if (frame.source, frame.seq) not in server.stored]
    assert sender.counters["rejected"] == sum(frame.samples for frame in refused)
    assert sender.counters["quarantined_frames"] == len(refused) == 2
    assert len([r for r in caplog.records if "status 422" in r.message]) == 1
    assert len({frame.seq for frame in server.frames}) == len(server.frames), "a refused frame was sent again"


def test_a09_wrong_key_is_told_once_with_the_variable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Driven(tmp_path, RecordingTransport([Reply(401, {}, b""), Reply(403, {}, b"")]))
    one.goes_on(125, [row(1), row(2)])
    assert one.sent_at[:3] == [0.0, 60.0, 120.0]
    assert steps_in(one.transport.stored.values()) == [1, 2]
    assert [record.levelno for record in caplog.records if "PERFAGENT_API_KEY" in record.message] == [logging.ERROR]
    one.end()


def test_a10_foreign_answer_is_no_acknowledgement(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = [Reply(200, {}, b"<html>Log in to the hotel's network</html>"), Reply(204, {}, b""), Reply(404, {}, b"")]
    one = Driven(tmp_path, RecordingTransport([*answers])).goes_on(0.5, [row(1)])
    assert (one.counters["failed"], one.counters["acked"], one.sender.spool.waiting) == (1, 0, 1)
    one.goes_on(10)
    assert one.counters["failed"] == 3
    assert {frame.seq for frame in one.transport.frames if frame.groups} == {1}
    assert steps_in(one.transport.stored.values()) == [1]
    assert [record.message for record in caplog.records if "no perfagent server" in record.message]
    one.end()
