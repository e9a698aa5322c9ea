"""The sender by its public side: rows and events in, frames out. Its schedule is tested with a clock of the test's own
(driven_sender.py)."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import until
from driven_sender import Driven, row, steps_in
from ingest_server import IngestServer
from progress import new_progress
from recording_transport import RecordingTransport

from perfagent.agent_config import AgentConfig
from perfagent.delivery.columns import DROPPED
from perfagent.delivery.courier import SOURCE_STUCK_S
from perfagent.delivery.exchange import jittered
from perfagent.delivery.handoff import MAX_EVENTS, MAX_ROWS
from perfagent.delivery.records import HEADER, TICK, decode_header, records_in
from perfagent.delivery.sender import Sender
from perfagent.delivery.transport import HttpTransport, Reply
from perfagent.errors import ServerUnreachable
from perfagent.identity import Identity
from perfagent.step.pending_logs import LoggedLater

pytestmark = pytest.mark.fault

Make = Callable[..., Driven]
WHOLE_S = 20.0
"""For an end that leaves nothing, nor a thread whose words another test would hear: `close` returns as soon as all is
done."""


def make(folder: Path, transport: Any = None, **more: Any) -> Sender:
    config = AgentConfig(state_dir=folder / "state", **{"server": "http://127.0.0.1:9", **more})
    return Sender(config, Identity(project="p", run="r", attempt=1), transport=transport)


@pytest.fixture
def transport() -> RecordingTransport:
    return RecordingTransport()


@pytest.fixture
def sender(tmp_path: Path, transport: RecordingTransport) -> Iterator[Sender]:
    made = make(tmp_path, transport)
    made.start()
    yield made
    made.close("finished", timeout_s=WHOLE_S)


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Make]:
    made: list[Driven] = []

    def make_one(transport: Any = None, **more: Any) -> Driven:
        made.append(Driven(tmp_path, transport, **more))
        return made[-1]

    yield make_one
    for one in made:
        one.end()


@pytest.fixture
def told(caplog):
    """The warnings of the agent so far are in told.messages."""
    caplog.set_level(logging.WARNING, "perfagent")
    return caplog


def one_of(told: pytest.LogCaptureFixture, word: str) -> str:
    (found,) = [message for message in told.messages if word in message]
    return found


def test_all_arrives_once_by_two_threads_and_the_end_is_final(tmp_path, sender, transport):
    for block in range(5):
        sender.rows.extend(map(row, range(200 * block, 200 * block + 200)))
        if block == 4:
            sender.event("phase", {"name": "eval", "duration_s": 1.0}, step=7)
        assert sender.flush(10)
    assert steps_in(transport.frames) == [*range(1000)]
    assert [(e.kind, e.step) for f in transport.frames for e in f.events] == [("phase", 7)]
    assert {(frame.project, frame.run, frame.attempt) for frame in transport.frames} == {("p", "r", 1)}
    assert [frame.seq for frame in transport.frames] == [*range(1, len(transport.frames) + 1)]
    assert sender.counters["acked"] == 2000

    def ours() -> list[bool]:
        return [thread.daemon for thread in threading.enumerate() if thread.name.startswith("perfagent")]

    until(lambda: ours() == [True, True], why="there are more, or one of an earlier test has not ended")
    sender.close("finished", "done", timeout_s=WHOLE_S)
    sender.close("failed")
    sender.event("alert", {"title": "late"})
    assert sender.disabled
    told = [event.data for frame in transport.frames for event in frame.events if event.kind != "phase"]
    assert told == [{"state": "finished", "reason": "done"}]
    assert list((tmp_path / "state" / "spool").iterdir()) == []


def test_new_name_is_on_the_disk_before_what_tells_of_it(sender: Sender, transport: RecordingTransport) -> None:
    sender.event("state", {"state": "starting"})
    assert sender.flush(10)
    sender.identity.project, sender.identity.name = "look", "password=hunter2hunter2"
    sender.event("state", {"state": "starting", "config": {}})
    assert sender.flush(10)
    assert [frame.project for frame in transport.frames if frame.events] == ["p", "look"]
    (path,) = sender.folder.glob("*.ticks")
    kinds, payloads = zip(*((kind, payload) for _, kind, payload in records_in(path.read_bytes())), strict=True)
    assert kinds == (HEADER, TICK, HEADER, TICK)
    header = decode_header(payloads[2])
    assert (header.project, header.name) == ("look", transport.frames[-1].name)
    assert "hunter2" not in header.name


# ---- when something is sent


UNWATCHED = Reply(200, {"perfagent-watched": "0"}, b'{"stored": 1, "duplicate": 0, "rejected": [], "commands": []}')


def test_frame_a_second_fewer_unwatched_and_a_sign_of_life(driven: Make) -> None:
    one = driven(RecordingTransport([UNWATCHED] * 3)).goes_on(12, map(row, itertools.count()))
    assert one.sent_at == [0.0, 3.0, 6.0, 9.0, 10.0, 11.0], "a page opened after the third answer"
    one.goes_on(12)
    assert one.sent_at[6:] == [12.0, 17.0, 22.0]
    assert [(frame.groups, frame.events) for frame in one.transport.frames[-2:]] == [([], [])] * 2


@pytest.mark.parametrize("kind", ["alert", "finding", "state", "phase", "loss"])
def test_what_matters_is_sent_at_once(driven: Make, kind: str) -> None:
    one = driven(flush_s=4.0).goes_on(1, [row(1)])
    if kind == "loss":
        one.sender.rows.append(row(2, math.nan))
    else:
        one.sender.event(kind, {"state": "running", "title": "x"})
    one.goes_on(5)
    assert one.sent_at[:2] == [0.0, 4.0 if kind == "phase" else 1.0]


def test_nan_that_stays_presses_less_until_it_was_gone(driven: Make) -> None:
    """Five frames a second took 0.7 % of the training's time."""
    one = driven(RecordingTransport([UNWATCHED] * 300))

    def sent(seconds: float, loss: float) -> list[float]:
        begin, before = one.now - one.start, len(one.sent_at)
        one.goes_on(seconds, (row(0, loss) for _ in itertools.count()))
        return [at - begin for at in one.sent_at[before:]]

    assert sent(9.0, 1.0) == [0.0, 3.0, 6.0]
    assert sent(10.0, math.nan) == [0.0, 3.0, 6.0, 9.0], "the first at once, then as always"
    sent(61.0, 1.0)
    assert sent(2.0, math.nan)[0] == 0.0


def test_a06_the_pause_that_the_server_asks_for_is_kept(driven: Make) -> None:
    one = driven(RecordingTransport([Reply(429, {"retry-after": "7"}, b""), ServerUnreachable("refused")]))
    one.goes_on(12, [row(1)])
    assert one.sent_at[:3] == [0.0, 7.0, 9.0], "then the sender's own pause"
    assert steps_in(one.transport.stored.values()) == [1]


def test_a05_thousandth_failure_is_like_the_tenth() -> None:
    """And the pauses of two agents differ, while the user's random state is left alone."""
    random.seed(1)
    before = random.getstate()
    pause, other = jittered(), jittered()
    for failures, most in ((1, 2.0), (2, 4.0), (4, 16.0), (5, 30.0), (5000, 30.0)):
        found = [pause(failures) for _ in range(200)]
        assert 1.0 <= min(found) < max(found) <= most, failures
        assert max(found) > 0.8 * most, failures
    assert pause(10) != other(10)
    assert random.getstate() == before


def test_samples_wait_until_the_run_is_known(driven: Make) -> None:
    identity = Identity(project="p", rank=1, world_size=2)
    one = driven(identity=identity).goes_on(2, [row(1)])
    assert one.transport.frames == []
    identity.attempt, identity.run = 5, "learned"
    one.goes_on(2)
    assert {(f.run, f.attempt, f.rank) for f in one.transport.frames} == {("learned", 5, 1)}
    assert steps_in(one.transport.frames) == [1]


# ---- recordings


# ---- what is left out, and who is told


def logged(step: int, values: dict[str, Any]) -> tuple[Any, ...]:
    return step, 1.7e9, 1.0, values


LEFT_OUT: dict[str, tuple[list[Any], str, str, int]] = {
    # name: (rows, a word of the one message, counter, its value)
    "no number": ([LoggedLater(1, 1.7e9, 1.0, {"x": 1.0, "note": "on"})] * 2, "'note' (a value of type str)", "refused_kind", 1),
    "too many": ([logged(1, {f"s/{n}": 1.0}) for n in range(2500)], "series", "refused_series", 500),
    "step": ([logged(2**70, {"x": 1.0})] * 3, "64 bits", "refused_step", 3),
    "name": ([logged(1, {"": 1.0})] * 3, "no name", "refused_name", 3),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_cannot_be_stored_is_counted_and_told_once(driven: Make, told, case: str) -> None:
    rows, word, counter, count = LEFT_OUT[case]
    one = driven()
    one.sender.rows.extend(rows)
    one.goes_on(2).sender.rows.extend(rows[:1])
    one.goes_on(2, [row(1)])
    assert len(told.messages) == 1 and word in told.messages[0]
    assert one.told(DROPPED)[-1] == one.counters[counter] >= count


def test_first_reason_of_a_server_that_leaves_out_is_told(driven: Make, told: pytest.LogCaptureFixture) -> None:
    left_out = b'{"stored": 1, "duplicate": 0, "rejected": [{"name": "a b", "reason": "too\\nlong", "count": 7}], "commands": []}'
    one = driven(RecordingTransport([Reply(200, {}, left_out)] * 2)).goes_on(2, map(row, range(20)))
    assert "a b (too long)" in one_of(told, "left out")
    assert one.counters["rejected"] == 14


@pytest.mark.parametrize("what", ["rows", "alerts"])
def test_what_came_too_fast_is_counted_and_told_once(driven: Make, told: pytest.LogCaptureFixture, what: str) -> None:
    one = driven()
    sender = one.sender
    sender.progress = new_progress(sender.rows)
    if what == "rows":
        sender.rows.extend(map(row, range(MAX_ROWS + 1234)))
    for number in range(MAX_EVENTS + 1234 if what == "alerts" else 0):
        sender.event("alert", {"title": str(number)})
    one.goes_on(4)
    gone = one.counters["overflows"]
    if what == "rows":
        assert len(steps_in(one.transport.frames)) + gone == MAX_ROWS + 1234
    else:
        titles = [event.data["title"] for frame in one.transport.frames for event in frame.events]
        assert titles == [str(number) for number in range(1234, MAX_EVENTS + 1234)]
        gone = one.counters["event_overflows"]
    assert one.told(DROPPED)[-1] == gone >= 1234
    assert one_of(told, "came faster")


@pytest.mark.parametrize(("rank", "level", "lines"), [(0, "NOTSET", 1), (1, "NOTSET", 0), (0, "ERROR", 0)])
def test_rank_0_says_once_where_its_run_is_seen(
    driven: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
    told: pytest.LogCaptureFixture,
    rank: int,
    level: str,
    lines: int,
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's: most scripts have none
    told.set_level(level, "perfagent")
    one = driven(identity=Identity(project="p", run="r", attempt=1, name="first", rank=rank))
    one.goes_on(10, [row(1), row(2)])
    assert one.counters["acked_frames"] > 1
    assert capsys.readouterr().err == "perfagent: watch it at http://127.0.0.1:9/run/r (run first)\n" * lines


# ---- commands, sources


def test_a23_callback_that_raises_costs_no_other_its_commands(driven: Make, told: pytest.LogCaptureFixture) -> None:
    one, calls, seen = driven(), [], []

    def bad(command: Any) -> None:
        calls.append(command)
        raise ValueError("callback")

    one.sender.on_command += [bad, seen.append]
    for number in range(5):
        one.transport.commands.append({"kind": "profile", "steps": number})
        one.goes_on(1, [row(number)])
    assert (len(calls), one.counters["errors"]) == (5, 5)
    assert seen == [{"kind": "profile", "steps": number} for number in range(5)]
    assert one_of(told, "command")


def test_a21_source_that_raises_thrice_in_a_row_goes(driven: Make, told: pytest.LogCaptureFixture) -> None:
    one, polls = driven(), Counter[str]()

    def moody() -> None:
        polls["moody"] += 1
        if polls["moody"] % 3:
            raise ValueError("now and then")

    def broken() -> None:
        polls["broken"] += 1
        raise SystemExit("always")

    one.sender.add_source(moody)
    one.sender.add_source(broken)
    one.goes_on(4, [row(1)])
    assert polls["broken"] == 3 and polls["moody"] > 12
    assert "broken" in one_of(told, "failed three times")
    assert steps_in(one.transport.frames) == [1]


# ---- A21: trouble of our own


def test_a21_a_loop_that_fails_twice_switches_the_agent_off(tmp_path, transport, monkeypatch, told):
    sender, write = make(tmp_path, transport), os.write

    def fails(fd: int, data: Any) -> int:
        if threading.current_thread().name == "perfagent-sender":
            raise RuntimeError("broken")
        return write(fd, data)

    monkeypatch.setattr(os, "write", fails)
    sender.start()
    until(lambda: sender.disabled or sender.rows.append(row(1)))
    assert until(lambda: "broken" in told.text and "switched off" in told.text)
    assert one_of(told, "switched off")
    assert sender.closed.wait(20)
    until(lambda: not any(thread.name == "perfagent-sender" for thread in threading.enumerate()))
    began = time.monotonic()
    assert not sender.flush(60)
    sender.close("finished", timeout_s=60)
    assert time.monotonic() - began < 30, "the end waits for a thread that is no more"


# ---- what hangs


@pytest.fixture
def real(driven: Make) -> Iterator[tuple[Driven, IngestServer]]:
    """With a server, since a thread that hangs is left there with its connection."""
    with IngestServer() as server:
        yield driven(HttpTransport(server.url), server=server.url), server


@pytest.mark.real
def test_a22_source_that_hangs_is_left_and_polled_again_later(real, told):
    one, server = real
    release, polls = threading.Event(), []

    def hangs() -> None:
        polls.append(threading.current_thread())
        release.wait(60)

    one.sender.add_slow_source(hangs, every_s=0.5)
    one.goes_on(0.1, [row(1)], waits=False)
    until(lambda: polls)
    one.goes_on(SOURCE_STUCK_S - 0.1, [row(2)], waits=False)
    assert one.counters["couriers_lost"] == 0
    one.goes_on(2, waits=False)
    assert one.counters["couriers_lost"] == 1
    until(
        lambda: one.goes_on(0.1, waits=False) and sorted(server.values("loss")) == [1, 2], why="delivery waits for it"
    )
    assert len(polls) == 1
    assert "hangs" in one_of(told, "source")
    release.set()
    polls[0].join(20)
    until(lambda: one.goes_on(1, waits=False) and len(polls) > 3, why="it is never asked again")
    assert len({*polls}) == 2, "the thread that was left behind goes on"
