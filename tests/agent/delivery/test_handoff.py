from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import until
from faults.loops import orphan
from ingest_server import IngestServer

from perfagent.agent_config import AgentConfig
from perfagent.delivery import courier, segments, send_loop
from perfagent.delivery.columns import DROPPED, pack
from perfagent.delivery.handoff import MAX_EVENTS, MAX_ROWS, Sender
from perfagent.delivery.orphans import Orphans
from perfagent.delivery.segments import HEADER, TICK, Segments, decode_header, records
from perfagent.delivery.spool import Header, Spool
from perfagent.delivery.transport import RecordingTransport, Reply
from perfagent.errors import ServerUnreachable
from perfagent.governor import Governor
from perfagent.hooks.new_progress import new_progress
from perfagent.identity import Identity
from perfagent.step.pending_logs import LoggedLater
from perfagent.wire import Frame, Group

NAMES = ("loss", "lr")
WHOLE_S = 20.0
"""For an end that leaves nothing, nor a thread whose words another test would hear: `close` returns as soon as all is
done."""


def config(folder: Path, **more: Any) -> AgentConfig:
    return AgentConfig(state_dir=folder / "state", **{"server": "http://127.0.0.1:9", **more})


def row(step: int, loss: float = 0.5) -> tuple[Any, ...]:
    return step, time.time(), time.monotonic(), NAMES, (loss, 1e-3)


def make(folder: Path, transport: Any = None, **more: Any) -> Sender:
    settings = config(folder, **more)
    return Sender(settings, Identity(project="p", run="r", attempt=1), transport=transport)


@pytest.fixture
def transport() -> RecordingTransport:
    return RecordingTransport()


@pytest.fixture
def sender(tmp_path: Path, transport: RecordingTransport) -> Iterator[Sender]:
    made = make(tmp_path, transport)
    made.start()
    yield made
    made.close("finished", timeout_s=WHOLE_S)


def steps(frames: list[Frame], name: str = "loss") -> list[int]:
    return [step for frame in frames for group in frame.groups if name in group.values for step in group.steps()]


def test_rows_and_events_arrive_in_order_and_once(sender: Sender, transport: RecordingTransport) -> None:
    for step in range(1000):
        sender.rows.append(row(step))
    sender.event("phase", {"name": "eval", "duration_s": 1.0}, step=7)
    assert sender.flush(10)
    assert steps(transport.frames) == list(range(1000))
    assert [(e.kind, e.step) for f in transport.frames for e in f.events] == [("phase", 7)]
    assert (transport.frames[0].project, transport.frames[0].run, transport.frames[0].attempt) == ("p", "r", 1)
    assert sender.counters["acked"] == 2000


class Interrupted:
    """A row that the training thread logs and flushes behind, just while the sender drains what was there before."""

    def __init__(self, sender: Sender, answers: list[bool]) -> None:
        self.sender, self.answers = sender, answers
        self.thread = threading.Thread(target=self.log)

    def ready(self) -> bool:
        self.thread.start()
        until(lambda: self.sender.flushes, within_s=5)
        return True

    def log(self) -> None:
        self.sender.rows.append(row(2))
        self.answers.append(self.sender.flush(10))

    def row(self) -> tuple[Any, ...]:
        return row(1)


def test_a_flush_waits_for_rows_that_came_while_others_were_drained(
    sender: Sender, transport: RecordingTransport
) -> None:
    answers: list[bool] = []
    interrupted = Interrupted(sender, answers)
    sender.rows.append(interrupted)  # type: ignore[arg-type]
    until(lambda: interrupted.thread.is_alive() or answers, within_s=5)
    interrupted.thread.join(10)
    assert answers == [True]
    assert steps(transport.frames) == [1, 2]


def test_frames_are_numbered_from_one_without_gaps(sender: Sender, transport: RecordingTransport) -> None:
    for n in range(5):
        sender.rows.append(row(n))
        assert sender.flush(10)
    assert [frame.seq for frame in transport.frames] == [1, 2, 3, 4, 5]


def test_a_clean_end_leaves_no_folder_behind(tmp_path: Path, transport: RecordingTransport) -> None:
    sender = make(tmp_path, transport)
    sender.start()
    sender.rows.append(row(1))
    sender.close("finished", "done", timeout_s=WHOLE_S)
    assert [e.data for f in transport.frames for e in f.events] == [{"state": "finished", "reason": "done"}]
    assert list((tmp_path / "state" / "spool").iterdir()) == []


def test_another_name_or_project_is_on_the_disk_before_what_tells_of_it(
    sender: Sender, transport: RecordingTransport
) -> None:
    sender.event("state", {"state": "starting"})
    assert sender.flush(10)
    sender.identity.project, sender.identity.name = "look", "password=hunter2hunter2"
    sender.event("state", {"state": "starting", "config": {}})
    assert sender.flush(10)
    assert [frame.project for frame in transport.frames if frame.events] == ["p", "look"]
    (path,) = sender.folder.glob("*.ticks")
    kinds, payloads = zip(*((kind, payload) for _, kind, payload in records(path.read_bytes())), strict=True)
    assert kinds == (HEADER, TICK, HEADER, TICK)
    header = decode_header(payloads[2])
    assert (header.project, header.name) == ("look", transport.frames[-1].name)
    assert "hunter2" not in header.name


def test_close_is_final_and_may_be_called_twice(tmp_path: Path, transport: RecordingTransport) -> None:
    sender = make(tmp_path, transport)
    sender.start()
    sender.close("finished", timeout_s=WHOLE_S)
    sender.close("failed")
    sender.event("alert", {"title": "late"})
    assert sender.disabled
    assert [e.data["state"] for f in transport.frames for e in f.events] == ["finished"]


def test_a_nonfinite_loss_is_sent_at_once(
    tmp_path: Path, transport: RecordingTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_loop, "HEARTBEAT_S", 3600.0)
    sender = make(tmp_path, transport, flush_s=3600.0)
    sender.start()
    sender.rows.append(row(1))
    assert sender.flush(20)
    sender.rows.append(row(2))
    until(lambda: sender.counters["spooled"] == 4)
    assert len(transport.frames) == 1  # an ordinary row waits for the hour to pass
    sender.rows.append(row(3, math.nan))
    until(lambda: len(transport.frames) == 2, why="NaN must not wait for the flush")
    assert steps(transport.frames) == [1, 2, 3]
    sender.close("finished", timeout_s=WHOLE_S)


@pytest.mark.parametrize("kind", ["alert", "finding", "state"])
def test_events_that_matter_are_sent_at_once(tmp_path: Path, transport: RecordingTransport, kind: str) -> None:
    sender = make(tmp_path, transport, flush_s=3600.0)
    sender.start()
    sender.rows.append(row(1))
    until(lambda: len(transport.frames) == 1)
    sender.event(kind, {"state": "running", "title": "x"})
    until(lambda: any(f.events for f in transport.frames), within_s=5, why=f"{kind} must not wait")
    sender.close("")


def sent_at(sender: Sender, seconds: int, logged: Iterator[tuple[Any, ...]]) -> list[float]:
    """When requests begin, in seconds from the start. Does what the sender's thread does, with a clock of its own."""
    dispatcher, found = sender._dispatch(), []
    sender.spool.create()
    dispatcher._last_sent = 100.0
    for tick in range(10 * seconds):
        now = 100.0 + tick / 10
        sender.rows.extend(itertools.islice(logged, 20))
        dispatcher._tick(now)
        if now >= dispatcher._rest_until:
            dispatcher._advance(now)
        if dispatcher._busy is not None:
            found.append(tick / 10)
            until(lambda: dispatcher._courier.answers)
            dispatcher._advance(now)
    dispatcher._finish(now)
    return found


def test_in_steady_state_there_is_about_one_request_a_second(tmp_path: Path, transport: RecordingTransport) -> None:
    sender = make(tmp_path, transport)
    assert sent_at(sender, 4, map(row, itertools.count())) == [0.0, 1.0, 2.0, 3.0]
    sender.close("finished")


def test_a_quiet_process_gives_a_sign_of_life_every_five_seconds(tmp_path: Path, transport: RecordingTransport) -> None:
    sender = make(tmp_path, transport)
    assert sent_at(sender, 12, iter(())) == [5.0, 10.0]
    assert (transport.frames[0].groups, transport.frames[0].events) == ([], [])
    assert not list(sender.spool.folder.glob("*.ticks"))
    sender.close("finished")


def test_commands_of_the_reply_reach_the_callbacks_and_a_raising_one_harms_nobody(
    sender: Sender, transport: RecordingTransport
) -> None:
    seen: list[Any] = []

    def bad(_: Any) -> None:
        raise RuntimeError("callback")

    sender.on_command += [bad, seen.append]
    transport.commands.append({"kind": "profile", "steps": 5})
    sender.rows.append(row(1))
    assert sender.flush(10)
    assert seen == [{"kind": "profile", "steps": 5}]
    assert sender.counters["errors"] == 1


class OnDevice:
    def __init__(self, step: int) -> None:
        self.step, self.arrived = step, False

    def ready(self) -> bool:
        return self.arrived

    def row(self) -> tuple[Any, ...]:
        return row(self.step)


def test_a_row_that_is_still_on_the_device_holds_back_no_other_series(
    sender: Sender, transport: RecordingTransport
) -> None:
    waiting = OnDevice(2)
    sender.rows.extend([row(1), waiting, row(3)])
    until(lambda: sender.counters["spooled"] == 4)
    waiting.arrived = True
    assert sender.flush(10)
    assert sorted(steps(transport.frames)) == [1, 2, 3]


class LostDevice:
    def ready(self) -> bool:
        raise RuntimeError("CUDA error: device lost")

    def row(self) -> tuple[Any, ...]:
        raise AssertionError("never ready")


def test_a_row_whose_device_was_lost_is_dropped_and_counted(sender: Sender, transport: RecordingTransport) -> None:
    sender.rows.extend([LostDevice(), row(1)])
    assert sender.flush(10)
    assert steps(transport.frames) == [1]
    assert sender.counters["dropped"] == 1


def test_a_row_that_never_arrives_does_not_hold_up_the_end(tmp_path: Path, transport: RecordingTransport) -> None:
    sender = make(tmp_path, transport)
    sender.start()
    sender.rows.extend([OnDevice(1), row(2)])
    sender.close("finished", timeout_s=WHOLE_S)
    assert steps(transport.frames) == [2]
    assert sender.counters["dropped"] == 1


def test_recording_writes_files_and_never_touches_the_network(tmp_path: Path, transport: RecordingTransport) -> None:
    sender = make(tmp_path, transport, record=tmp_path / "record")
    sender.start()
    for step in range(100):
        sender.rows.append(row(step))
    sender.close("finished", timeout_s=WHOLE_S)
    assert transport.frames == []
    spool = Spool.open(tmp_path / "record" / sender.identity.source, recording=True)
    frame = spool.next()
    assert frame is not None
    assert [s for g in frame.groups for s in g.steps()] == list(range(100))
    assert [e.data["state"] for e in frame.events] == ["finished"]
    assert not (tmp_path / "state").exists()


def test_a_recording_that_cannot_be_written_is_called_so(
    tmp_path: Path, transport: RecordingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "record").write_text("a file of the user's")
    sender = make(tmp_path, transport, record=tmp_path / "record")
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender.start()
        sender.rows.append(row(1))
        sender.close("finished", timeout_s=WHOLE_S)
    written, lost = [record.message for record in caplog.records]
    assert written.startswith(f"perfagent: the recording {tmp_path / 'record'}/")
    assert "(Not a directory); keeping up to " in written
    assert lost.endswith("are lost: the recording cannot be written")


def test_samples_wait_until_the_run_is_known(tmp_path: Path, transport: RecordingTransport) -> None:
    settings = config(tmp_path)
    identity = Identity(project="p", rank=1, world_size=2)
    sender = Sender(settings, identity, transport=transport)
    sender.start()
    sender.rows.append(row(1))
    until(lambda: sender.counters["spooled"] == 2)
    assert transport.frames == []
    identity.attempt, identity.run = 5, "learned"
    assert sender.flush(10)
    assert {(f.run, f.attempt, f.rank) for f in transport.frames} == {("learned", 5, 1)}
    sender.close("finished", timeout_s=WHOLE_S)


def test_the_users_random_state_is_left_alone(tmp_path: Path) -> None:
    class Down:
        def post(self, *_: Any, **__: Any) -> Any:
            raise ServerUnreachable("refused")

        def close(self) -> None: ...

        def abandon(self) -> None: ...

    random.seed(1)
    before = random.getstate()
    sender = make(tmp_path, Down())
    sender.start()
    sender.rows.append(row(1))
    until(lambda: sender.counters["failed"] >= 1)
    sender.close("finished", timeout_s=WHOLE_S)
    assert random.getstate() == before


def test_at_most_two_threads_are_running(sender: Sender) -> None:
    sender.rows.append(row(1))
    assert sender.flush(10)

    def ours() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("perfagent")]

    until(lambda: len(ours()) == 2, why="there are more, or one of an earlier test has not ended")
    assert all(thread.daemon for thread in ours())


def test_a_closed_sender_can_be_collected(tmp_path: Path, transport: RecordingTransport) -> None:
    sender = make(tmp_path, transport)
    sender.start()
    sender.rows.append(row(1))
    assert sender.flush(10)
    sender.close("finished", timeout_s=WHOLE_S)
    thread, carrier = sender._thread, sender._dispatch()._courier
    assert thread is not None
    assert carrier is not None
    thread.join(20)
    carrier._thread.join(20)  # until then it knows its last request
    gone = weakref.ref(sender)
    del sender
    gc.collect()
    assert gone() is None


def test_a_value_that_is_no_number_is_told_by_its_name(
    tmp_path: Path, transport: RecordingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    sender = make(tmp_path, transport)
    sender.start()
    sender.rows.append(LoggedLater(1, time.time(), time.monotonic(), {"loss": 1.0, "note": "warming up"}))
    with caplog.at_level(logging.WARNING, "perfagent"):
        assert sender.flush(10)
    (said,) = [record.message for record in caplog.records if "no numbers" in record.message]
    assert said.endswith("the first of them was 'note' (a value of type str)")
    sender.close("finished", timeout_s=WHOLE_S)


def test_two_thousand_and_one_series_give_one_warning(
    tmp_path: Path, transport: RecordingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    sender = make(tmp_path, transport)
    sender.start()
    for n in range(2500):
        sender.rows.append((1, time.time(), time.monotonic(), {f"s/{n}": 1.0}))
    with caplog.at_level(logging.WARNING, "perfagent"):
        assert sender.flush(10)
    assert sender.counters["refused_series"] == 500
    assert len([r for r in caplog.records if "series" in r.message]) == 1
    sender.close("finished", timeout_s=WHOLE_S)


def test_of_what_the_server_leaves_out_the_first_reason_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_out = b'{"stored": 1, "duplicate": 0, "rejected": [{"name": "a b", "reason": "too\\nlong", "count": 7}], "commands": []}'
    sender = make(tmp_path, RecordingTransport([Reply(200, {}, left_out)] * 2))
    sender.start()
    with caplog.at_level(logging.WARNING, "perfagent"):
        for step in range(2):
            sender.rows.append(row(step))
            assert sender.flush(10)
    (told,) = [record.message for record in caplog.records if "left out" in record.message]
    assert "left out a b (too long)" in told
    assert sender.counters["rejected"] == 14
    sender.close("finished", timeout_s=WHOLE_S)


@pytest.mark.parametrize(
    ("step", "values", "word"), [(2**70, {"x": 1.0}, "steps are beyond 64 bits"), (1, {"": 1.0}, "have no name")]
)
def test_what_cannot_be_stored_for_its_step_or_name_is_told_once(
    tmp_path: Path, transport: RecordingTransport, caplog: pytest.LogCaptureFixture, step: int, values: Any, word: str
) -> None:
    sender = make(tmp_path, transport)
    sender.start()
    with caplog.at_level(logging.WARNING, "perfagent"):
        for _ in range(3):
            sender.rows.append((step, time.time(), time.monotonic(), values))
        sender.rows.append(row(1))
        assert sender.flush(10)
        sender.close("finished", timeout_s=WHOLE_S)
    assert len([record for record in caplog.records if word in record.message]) == 1


def test_rows_that_came_too_fast_are_counted_one_by_one(
    tmp_path: Path, transport: RecordingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    sender = make(tmp_path, transport)
    sender.progress = new_progress(sender.rows, Governor(0.5))
    for step in range(MAX_ROWS + 1234):
        sender.rows.append(row(step))
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender.start()
        assert sender.flush(30)
        sender.close("finished", timeout_s=WHOLE_S)
    kept = len(steps(transport.frames))
    assert kept + sender.counters["overflows"] == MAX_ROWS + 1234
    told = [value for f in transport.frames for g in f.groups if DROPPED in g.values for value in g.column(DROPPED)]
    assert told[-1] == sender.counters["overflows"] >= 1234
    assert len([record for record in caplog.records if "came faster" in record.message]) == 1


def test_alerts_that_came_too_fast_are_counted_one_by_one(
    tmp_path: Path, transport: RecordingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    sender = make(tmp_path, transport)
    for number in range(MAX_EVENTS + 1234):
        sender.event("alert", {"title": str(number)})
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender.start()
        assert sender.flush(30)
        sender.close("finished", timeout_s=WHOLE_S)
    titles = [event.data["title"] for frame in transport.frames for event in frame.events if event.kind == "alert"]
    assert titles == [str(number) for number in range(1234, MAX_EVENTS + 1234)]
    assert sender.counters["event_overflows"] == 1234
    told = [value for f in transport.frames for g in f.groups if DROPPED in g.values for value in g.column(DROPPED)]
    assert told[-1] == 1234
    assert len([record for record in caplog.records if "came faster" in record.message]) == 1


def test_alerts_out_of_order_are_no_drop(
    tmp_path: Path, transport: RecordingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    """Two threads may put them in in the other order than they were numbered, and one is put first on purpose."""
    sender = make(tmp_path, transport)
    for number in range(5):
        sender.event("alert", {"title": str(number)})
    last = sender.events.pop()
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender.events.appendleft(last)
        held = sender.events.pop()
        sender.start()
        assert sender.flush(30)
        sender.events.append(held)
        assert sender.flush(30)
        sender.close("finished", timeout_s=WHOLE_S)
    assert sum(event.kind == "alert" for frame in transport.frames for event in frame.events) == 5
    assert not sender.counters["event_overflows"]
    assert not caplog.records


def test_alerts_that_never_stop_coming_keep_nothing_from_being_written(
    tmp_path: Path, transport: RecordingTransport
) -> None:
    sender = make(tmp_path, transport)

    class Endless(deque[Any]):
        """As if another thread handed them in as fast as they are taken."""

        def popleft(self) -> Any:
            if not sender.flushes:
                sender.event("alert", {"title": "again"})
            return super().popleft()

    sender.events = Endless(maxlen=MAX_EVENTS)
    sender.event("alert", {"title": "first"})
    sender.rows.append(row(1))
    sender.start()
    try:
        until(lambda: steps(transport.frames) == [1], within_s=10, why="what is handed in is taken without end")
    finally:
        sender.flush(10)
        sender.close("finished", timeout_s=WHOLE_S)


@pytest.mark.fault
def test_a08_alerts_that_the_server_refused_are_counted_with_what_was_dropped(tmp_path: Path) -> None:
    transport = RecordingTransport([Reply(400, {}, b"no")])
    sender = make(tmp_path, transport)
    sender.event("alert", {"title": "refused"})
    sender.start()
    until(lambda: sender.counters["rejected_events"] == 1)
    assert (sender.counters["quarantined_frames"], sender.counters["rejected"]) == (1, 0)
    told = until(lambda: [g.column(DROPPED) for f in transport.frames for g in f.groups if DROPPED in g.values])
    assert [*told[-1]] == [1.0]
    sender.close("finished", timeout_s=WHOLE_S)


@pytest.mark.fault
@pytest.mark.parametrize("counter", ["dropped", "thinned", "dropped_events"])
def test_a05_what_the_spool_had_no_room_for_is_told_to_the_server(
    sender: Sender, transport: RecordingTransport, counter: str
) -> None:
    sender.rows.append(row(1))
    assert sender.flush(10)
    sender.spool.counters[counter] += 7
    told = until(lambda: [g.column(DROPPED) for f in transport.frames for g in f.groups if DROPPED in g.values])
    assert [*told[-1]] == [7.0]


# ---- A21: trouble of our own


@pytest.mark.fault
def test_a_source_that_has_put_itself_off_is_polled_as_soon_as_somebody_makes_it_due(sender: Sender) -> None:
    polled: list[float] = []
    source = sender.add_source(lambda: polled.append(time.monotonic()), every_s=math.inf)
    other: list[None] = []
    sender.add_source(lambda: other.append(None), every_s=0.2)
    assert until(lambda: len(other) >= 3)
    assert len(polled) == 1, "others were polled meanwhile"
    source.due = sender.sources_due = 0.0
    assert until(lambda: len(polled) == 2)


def test_a21_a_source_that_raises_is_switched_off_after_three_times(
    sender: Sender, transport: RecordingTransport, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def bad() -> None:
        calls.append(1)
        raise MemoryError

    sender.add_source(bad)
    with caplog.at_level(logging.WARNING, "perfagent"):
        until(lambda: any("failed three times" in r.message for r in caplog.records))
    assert len(calls) == 3
    sender.rows.append(row(1))
    assert sender.flush(10)


@pytest.mark.fault
@pytest.mark.parametrize("method", ["draft", "read_drafts", "next", "hold", "ack"])
@pytest.mark.parametrize("error", [RuntimeError("fault"), MemoryError()])
def test_a21_an_error_anywhere_in_the_loop_is_survived_once_and_loses_nothing_spooled(
    tmp_path: Path, transport: RecordingTransport, method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make(tmp_path, transport)
    original = getattr(sender.spool, method)
    raised: list[bool] = []

    def once(*arguments: Any, **more: Any) -> Any:
        if not raised:
            raised.append(True)
            raise error
        return original(*arguments, **more)

    monkeypatch.setattr(sender.spool, method, once)
    if method == "hold":
        transport.answers.append(ServerUnreachable("refused"))
    sender.start()
    sender.rows.append(row(1))
    until(lambda: raised, why=f"{method} was never called")
    sender.rows.append(row(2))
    assert sender.flush(20)
    assert sender.counters["errors"] == 1
    stored = steps(list(transport.stored.values()))
    # what was drained into a failing draft never was on the disk
    assert stored == ([2] if method == "draft" else [1, 2])
    assert sender.counters["lost_samples"] == (2 if method == "draft" else 0)
    sender.close("finished", timeout_s=WHOLE_S)


@pytest.mark.fault
def test_a21_a_loop_that_fails_twice_switches_the_agent_off_with_one_warning(
    tmp_path: Path, transport: RecordingTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sender = make(tmp_path, transport)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(sender.spool, "draft", fail)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender.start()
        for step in range(3):
            sender.rows.append(row(step))
            until(lambda step=step: sender.counters["errors"] > step or sender.disabled)
    assert sender.disabled
    until(lambda: "switched off" in caplog.text, within_s=5)
    assert len([r for r in caplog.records if "switched off" in r.message]) == 1
    monkeypatch.setattr(sender.closed, "wait", lambda _: pytest.fail("the end waits for a thread that is no more"))
    assert not sender.flush(5)
    assert not sender.flushes, "it was asked for, and waited for"
    sender.close("finished")


@pytest.mark.fault
def test_a21_no_thread_to_be_had_switches_the_agent_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sender = make(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender.start()
    assert sender.disabled
    assert "can't start new thread" in caplog.text


@pytest.mark.fault
def test_a22_a_source_that_hangs_is_left_behind_and_delivery_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perfagent.delivery import courier as module

    monkeypatch.setattr(module, "STUCK_S", 1.0)
    release = threading.Event()
    with IngestServer() as server:
        sender = make(tmp_path, server=server.url)
        sender.add_slow_source(lambda: release.wait(60) and None)
        sender.start()
        sender.rows.append(row(1))
        until(lambda: sender.counters["couriers_lost"] == 1, why="the hanging courier was never noticed")
        sender.rows.append(row(2))
        assert sender.flush(10)
        assert sorted(server.values("loss")) == [1, 2]
        release.set()
        sender.close("finished", timeout_s=WHOLE_S)


@pytest.mark.fault
def test_a22_a_source_that_comes_back_is_polled_again_by_the_thread_that_took_over(tmp_path: Path) -> None:
    release, polls = threading.Event(), []

    def hangs() -> None:
        polls.append(threading.current_thread())
        release.wait(60)

    with IngestServer() as server:
        sender = make(tmp_path, server=server.url)
        sender.add_slow_source(hangs, every_s=0.02)
        sender.start()
        sender.rows.append(row(1))
        first = until(lambda: sender._dispatch()._courier)
        until(lambda: sender.counters["couriers_lost"] == 1, why="the hanging courier was never noticed")
        sender.rows.append(row(2))
        assert sender.flush(10)
        second = sender._dispatch()._courier
        assert second is not None
        assert second._transport is not first._transport, "two threads have one connection"
        assert len(polls) == 1
        release.set()
        until(lambda: len(polls) > 3, why="it is never asked again")
        assert polls[0] is first._thread
        assert {*polls[1:]} == {second._thread}
        until(lambda: not first.runs, why="the thread that was left behind goes on")
        sender.close("finished", timeout_s=WHOLE_S)


class ToTheDead(RecordingTransport):
    """Has a command for whoever asks as the dead process, and says that no page shows its run."""

    def post(self, body: bytes, **more: Any) -> Reply:
        reply = super().post(body, **more)
        if self.frames[-1].source != "dead":
            return reply
        told = {**msgspec.json.decode(reply.body), "commands": [{"kind": "flush"}]}
        return Reply(200, {"perfagent-watched": "0"}, msgspec.json.encode(told))


def test_what_the_server_tells_a_dead_process_is_not_obeyed_by_the_one_that_sends_for_it(tmp_path: Path) -> None:
    transport = ToTheDead()
    settings = config(tmp_path)
    header = Header(source="dead", project="p", rank=0, server=settings.server, run="q", attempt=1)
    left = Spool(settings.sources / "dead", header)
    times = [1.0]
    left.append([Group(step=[1], time=times, monotonic=times, values={"loss": pack([0.5])})], [], now=0.0)
    left.abandon()
    obeyed: list[Any] = []
    sender = make(tmp_path, transport)
    sender.on_command.append(obeyed.append)
    sender.start()
    sender.rows.append(row(1))
    until(lambda: not left.folder.exists(), why="what the dead process left was not sent")
    dispatcher = sender._dispatch()
    assert ("dead", 1) in transport.stored
    assert (obeyed, dispatcher._watched) == ([], True)
    sender.close("finished", timeout_s=WHOLE_S)


@pytest.mark.fault
@pytest.mark.parametrize("status", [400, 200])
def test_a08_what_the_server_refuses_of_a_dead_process_is_told_and_is_no_drop_of_the_run_that_sends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    class Refusing(RecordingTransport):
        def post(self, body: bytes, **more: Any) -> Reply:
            reply = super().post(body, **more)
            if self.frames[-1].source != "dead":
                return reply
            rejected = [{"name": "loss", "reason": "no", "count": 5}]
            return Reply(
                status, {}, msgspec.json.encode({"stored": 0, "duplicate": 0, "rejected": rejected, "commands": []})
            )

    orphan(config(tmp_path).state_dir, "dead", "http://127.0.0.1:9")
    transport = Refusing()
    sender = make(tmp_path, transport)
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender.start()
        sender.rows.append(row(1))
        until(lambda: sender._dispatch().orphans.done, why="what the dead process left was not sent")
        sender.close("finished", timeout_s=WHOLE_S)
    assert len(caplog.records) == 1
    assert sender.counters["rejected"] == 0
    assert not [
        name for frame in transport.frames for group in frame.groups for name in group.values if name == DROPPED
    ]
    assert not sender.spool.folder.exists(), "nothing is left of a run that was delivered whole"


@pytest.mark.fault
def test_a15_an_orphan_on_a_disk_that_hangs_is_left_and_delivery_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, release = threading.Event(), threading.Event()

    def look(_: Orphans) -> None:
        looks.set()
        release.wait(60)

    monkeypatch.setattr(Orphans, "look", look)
    with IngestServer() as server:
        sender = make(tmp_path, server=server.url)
        sender.start()
        sender.rows.append(row(1))
        assert looks.wait(20)
        hangs = sender._dispatch()._courier
        assert hangs is not None
        hangs._errand_since -= courier.STUCK_S + 1  # as if it had hung for so long; a request may take its time
        sender.rows.append(row(2))
        sender.wake.ring()
        until(lambda: sorted(server.values("loss")) == [1, 2], why="delivery waits for what a dead process left")
        assert sender.counters["couriers_lost"] == 1
        assert "unreachable" not in sender.told, "the server has nothing to do with it"
        release.set()
        sender.close("finished", timeout_s=WHOLE_S)


class NeverAnswers(RecordingTransport):
    def __init__(self) -> None:
        super().__init__()
        self.asked, self.over = threading.Event(), threading.Event()

    def post(self, body: bytes, **more: Any) -> Reply:
        self.asked.set()
        self.over.wait(60)
        return super().post(body, **more)


def test_what_no_answer_came_for_until_the_end_is_told_though_nothing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport = NeverAnswers()
    sender = make(tmp_path, transport)
    sender.start()
    sender.rows.append(row(1))
    assert transport.asked.wait(20)
    ended = sender.closed.wait
    monkeypatch.setattr(sender.closed, "wait", lambda _: ended(20))  # the sender's thread may be late
    sender.close("finished", timeout_s=0.3)
    assert sender.closed.is_set(), "the sender's thread did not end"
    (told,) = [record.getMessage() for record in caplog.records]
    assert "not all of this run has reached server" in told
    assert str(sender.folder) in told
    transport.over.set()


@pytest.mark.fault
def test_a14_a_forked_child_takes_nothing(sender: Sender) -> None:
    pid = os.fork()
    if pid == 0:
        sender.event("alert", {"title": "from a child"})
        os._exit(0 if sender.disabled and not sender.events and not sender.flush(0.0) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert not sender.disabled


@pytest.mark.fault
def test_a14_a_forked_child_frees_nothing_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing an event or pinned memory calls CUDA, which a forked child cannot: each worker of a DataLoader would be
    aborted."""
    sender = make(tmp_path)  # without its thread, which would take the row in the parent, and free the event there
    read, write = os.pipe()

    class Event:
        def __del__(self) -> None:
            os.write(write, b"freed")

    monkeypatch.setattr("perfagent.device._elsewhere", True)
    sender.rows.append((1, 0.0, 0.0, ("loss",), [Event()]))  # type: ignore[arg-type]
    pid = os.fork()
    if pid == 0:
        gc.collect()
        os._exit(len(sender.rows))
    assert os.waitpid(pid, 0)[1] == 0
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 5)
    sender.rows.clear()
    os.close(read)


@pytest.mark.fault
def test_a13_the_last_state_stands_in_the_spool_that_is_left(tmp_path: Path) -> None:
    sender = make(tmp_path, RecordingTransport([ServerUnreachable("refused")] * 100))
    sender.start()
    sender.rows.append(row(1))
    sender.close("preempted", timeout_s=WHOLE_S)
    found = segments.owner(sender.folder)
    assert found is not None
    assert found.closed == "preempted"


@pytest.mark.fault
def test_a14_a_file_that_is_being_opened_while_another_thread_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, made, go_on = segments.opened, threading.Event(), threading.Event()

    def slow(path: Path, flags: int) -> Any:
        found = opened(path, flags)  # the descriptor is there, and nobody knows of it
        made.set()
        go_on.wait(20)
        return found

    monkeypatch.setattr(segments, "opened", slow)
    sender = make(tmp_path, RecordingTransport())
    sender.start()
    assert made.wait(20)
    here = files_below(tmp_path)
    pid = os.fork()
    if pid == 0:
        os._exit(len(files_below(tmp_path)))
    left = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert not go_on.is_set()
    go_on.set()
    sender.close("")
    assert (len(here), left) == (1, 0)


def files_below(folder: Path) -> list[str]:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is closed again
            names.append(str(link.readlink()))
    return [name for name in names if name.startswith(str(folder))]


@pytest.mark.fault
def test_a15_a_disk_that_hangs_holds_up_neither_the_end_nor_a_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, release = threading.Event(), threading.Event()
    hang = release.wait  # waits for the real time, whatever becomes of Event.wait below

    def create(_: Segments) -> bool:
        hangs.set()
        hang(60)
        return False

    monkeypatch.setattr(Segments, "create", create)
    sender = make(tmp_path, RecordingTransport())
    sender.start()
    assert hangs.wait(20)
    waited: list[float | None] = []
    monkeypatch.setattr(threading.Event, "wait", lambda _, timeout=None: waited.append(timeout))
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert waited == []
    sender.close("finished")
    monkeypatch.undo()
    (end,) = waited
    assert end is not None
    assert end <= 1.5
    release.set()
    assert sender.closed.wait(20)


def test_frames_are_rarer_while_no_page_shows_the_run(tmp_path: Path) -> None:
    unwatched = Reply(200, {"perfagent-watched": "0"}, b'{"stored": 1, "duplicate": 0, "rejected": [], "commands": []}')
    transport = RecordingTransport(answers=[unwatched] * 3)
    sender = make(tmp_path, transport)
    dispatcher = sender._dispatch()
    sent_at: list[float] = []
    for half in range(24):
        now = 100.0 + half / 2
        sender.rows.append(row(half))
        dispatcher._tick(now)
        dispatcher._advance(now)
        if dispatcher._busy is not None:
            sent_at.append(now - 100.0)
            until(lambda: dispatcher._courier.answers)
            dispatcher._advance(now)
    assert sent_at == [0.0, 3.0, 6.0, 9.0, 10.0, 11.0], "a page opened after the third answer"
    sender.rows.append((99, 1.0, 2.0, ("loss",), (math.nan,)))
    dispatcher._tick(111.6)
    dispatcher._advance(111.6)
    assert dispatcher._busy is not None, "what is urgent waits for nothing"
    dispatcher._finish(111.6)  # its courier ends


def test_a_loss_that_stays_nan_presses_less_and_less_often_until_it_was_good_for_a_while(tmp_path: Path) -> None:
    """Five frames a second took 0.7 % of the training's time."""
    unwatched = Reply(200, {"perfagent-watched": "0"}, b'{"stored": 1, "duplicate": 0, "rejected": [], "commands": []}')
    transport = RecordingTransport(answers=[unwatched] * 300)
    sender = make(tmp_path, transport)
    dispatcher = sender._dispatch()

    def sent(first: float, seconds: float, loss: float) -> list[float]:
        found = []
        for tick in range(int(seconds * 5)):
            now = first + tick / 5
            sender.rows.append((tick, 1.0, 2.0, ("loss",), (loss,)))
            dispatcher._tick(now)
            dispatcher._advance(now)
            if dispatcher._busy is not None:
                found.append(round(now - first, 1))
                until(lambda: dispatcher._courier.answers)
                dispatcher._advance(now)
        return found

    assert sent(100.0, 9.0, 1.0) == [0.0, 3.0, 6.0]
    pressed = sent(109.0, 30.0, math.nan)
    assert pressed[:4] == [0.0, 0.4, 1.0, 2.0], "the first at once"
    assert len(pressed) <= 14, "then hardly more than the usual frame every three seconds"
    sent(139.0, 61.0, 1.0)
    assert sent(200.1, 2.0, math.nan)[0] == 0.0
    dispatcher._finish(202.1)  # its courier ends


def test_a_slow_source_with_nothing_to_tell_is_not_asked_again(tmp_path: Path, transport: RecordingTransport) -> None:
    asked, others = [0], [0]

    def silent() -> bool:
        asked[0] += 1
        return False

    def often() -> None:
        others[0] += 1

    sender = make(tmp_path, transport)
    sender.add_slow_source(silent)
    sender.add_slow_source(often, every_s=0.02)
    sender.start()
    until(lambda: others[0] > 5, why="the other source was not asked at its own pace")
    assert asked == [1]
    assert not [note for note in sender.told if note.startswith("source")], "that is no failure"
    sender.close("finished", timeout_s=WHOLE_S)


def test_a_disabled_sender_does_nothing(tmp_path: Path, transport: RecordingTransport) -> None:
    sender = make(tmp_path, transport, disabled=True)
    sender.start()
    sender.event("alert", {"title": "x"})
    assert not sender.flush(1)
    sender.close("finished")
    assert transport.frames == []
    assert not (tmp_path / "state").exists()
    assert os.getpid() == sender._pid
