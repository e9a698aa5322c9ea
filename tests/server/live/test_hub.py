"""The parts of the live hub alone: what is kept of a run, and for how long; what a fleet is told; its thread."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from builders import until
from clocks import Clock

from perfagent.wire import Event, Group, RunSummary
from perfagent_server.live.bands import Bands
from perfagent_server.live.fleet import Fleet
from perfagent_server.live.hub import Hub
from perfagent_server.live.page import LAGGED, Page
from perfagent_server.live.subscription import Subscription
from perfagent_server.store.stored import Stored

FLEET = Subscription(names=frozenset(("loss", "tokens_per_s")), fleet=True)
ROW = {"name": "mine", "state": "running", "step": 1}


def stored(
    values: dict[str, list[float]], *, run: str = "r1", rank: int = 0, attempt: int = 1, first_step: int = 1
) -> Stored:
    rows = len(next(iter(values.values())))
    steps = list(range(first_step, first_step + rows))
    times = [float(step) for step in steps]
    group = Group(steps, times, times, dict(values))
    return Stored(1, run, attempt, rank, f"{run}-{rank}", first_step, 0.0, [group], [])


def decoded(message: bytes | None) -> Any:
    assert message is not None
    return msgspec.json.decode(message)


# --- bands --------------------------------------------------------------------------------------------------------------


def test_bands_of_an_ended_run_leave_at_once_and_are_dropped() -> None:
    bands = Bands(Subscription(bands=True))
    for rank, last in ((0, 3), (1, 2)):
        bands.add(stored({"loss": [1.0] * last}, rank=rank), 0.0)
    assert bands.take(0.1) is None and bands.waits, "a new band waits to learn which ranks there are"
    bands.end("r1")
    (band,) = decoded(bands.take(0.2))["bands"]
    assert band["step"] == [1, 2, 3], "also what the slower rank has not reached"
    assert not bands._of_runs and not bands.waits


def test_only_bands_that_hold_steps_are_looked_at_again() -> None:
    bands = Bands(Subscription(bands=True))
    for run in ("r1", "r2"):
        bands.add(stored({"loss": [1.0], "a": [1.0]}, run=run), 0.0)
    sent = decoded(bands.take(5.0))["bands"]
    assert [(band["run"], band["name"]) for band in sent] == [
        ("r1", "loss"),
        ("r1", "a"),
        ("r2", "loss"),
        ("r2", "a"),
    ]
    assert not bands.waits
    bands.add(stored({"loss": [1.0]}, run="r2", first_step=2), 5.0)
    assert list(bands._waiting) == [("r2", "loss")]
    assert [band["step"] for band in decoded(bands.take(5.1))["bands"]] == [[2]]


def test_a_run_that_goes_on_after_its_end_has_bands_again() -> None:
    bands = Bands(Subscription(bands=True))
    bands.add(stored({"loss": [1.0]}), 0.0)
    bands.end("r1")
    bands.take(0.1)
    bands.add(stored({"loss": [2.0]}, attempt=2, first_step=1), 10.0)
    assert decoded(bands.take(20.0))["bands"][0]["mean"] == [2.0]


# --- fleet --------------------------------------------------------------------------------------------------------------


def told(fleet: Fleet, **rows: dict[str, Any]) -> dict[str, Any]:
    change: dict[str, Any] = decoded(fleet.message(list(rows), rows))["fleet"]
    return change


def test_a_fleet_is_told_the_last_value_of_each_name_that_it_wants() -> None:
    fleet = Fleet(FLEET)
    fleet.add(stored({"loss": [3.0, 2.0], "lr": [0.1, 0.1]}))
    fleet.add(stored({"loss": [1.5]}, first_step=3))
    fleet.add(stored({"loss": [9.0]}, first_step=2))  # an older row that comes late
    assert told(fleet, r1=ROW) == {"r1": {**ROW, "values": {"loss": 1.5}}}


def test_a_fleet_is_told_only_what_has_changed() -> None:
    fleet = Fleet(FLEET)
    fleet.add(stored({"loss": [1.0], "tokens_per_s": [10.0]}))
    told(fleet, r1=ROW)
    fleet.add(stored({"loss": [1.0]}, first_step=2))
    assert told(fleet, r1={**ROW, "step": 2}) == {"r1": {"step": 2, "values": {"loss": 1.0}}}
    assert told(fleet, r1={**ROW, "step": 2, "state": "lost"}) == {"r1": {"state": "lost"}}


def test_a_fleet_puts_ranks_together_as_the_catalogue_says() -> None:
    fleet = Fleet(FLEET)
    for rank in range(3):
        fleet.add(stored({"loss": [float(rank)], "tokens_per_s": [10.0]}, rank=rank))
    assert told(fleet, r1=ROW)["r1"]["values"] == {"loss": 1.0, "tokens_per_s": 30.0}
    fleet.add(stored({"loss": [math.nan]}, rank=1, first_step=2))
    assert told(fleet, r1=ROW)["r1"]["values"] == {"loss": "NaN"}, "one rank's NaN is the run's"


def test_values_of_an_older_attempt_are_forgotten() -> None:
    fleet = Fleet(FLEET)
    for rank in range(2):
        fleet.add(stored({"tokens_per_s": [10.0]}, rank=rank, first_step=100))
    fleet.add(stored({"tokens_per_s": [7.0]}, attempt=2))
    fleet.add(stored({"tokens_per_s": [99.0]}, rank=1, first_step=101))  # its spool comes late
    assert told(fleet, r1=ROW)["r1"]["values"] == {"tokens_per_s": 7.0}


def test_a_fleet_keeps_nothing_of_runs_that_ended_or_are_gone() -> None:
    fleet = Fleet(FLEET)
    told(fleet, r1=ROW, r2=ROW)
    for run in ("r1", "r2"):
        fleet.add(stored({"loss": [1.0]}, run=run, first_step=5))
    message = decoded(fleet.message(["r1", "r2"], {"r1": {**ROW, "state": "finished"}}))
    assert message == {"fleet": {"r1": {"state": "finished", "values": {"loss": 1.0}}, "r2": None}}
    assert not fleet._values and not fleet._told
    fleet.add(stored({"loss": [7.0]}, first_step=4))  # its spool comes late
    assert "values" not in told(fleet, r1={**ROW, "state": "finished"})["r1"]
    assert not fleet._values and not fleet._told


def test_a_page_that_comes_later_is_told_everything() -> None:
    fleet = Fleet(FLEET)
    told(fleet, r1=ROW)
    fleet.tell_all()
    assert told(fleet, r1=ROW) == {"r1": ROW}
    assert told(fleet, r1=ROW) == {"r1": {}}


# --- the hub ------------------------------------------------------------------------------------------------------------


class Pages:
    """A hub that is not started, with pages that have no socket: each turn is called here."""

    def __init__(self, *subscriptions: Subscription) -> None:
        self.clock = Clock(100.0)
        self.states: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.hub = Hub(self.summaries, self.rows, clock=self.clock)
        self.hub._call_loop = lambda function, *arguments: function(*arguments)  # type: ignore[method-assign]
        self.pages = []
        for subscription in subscriptions:
            page = Page()
            self.hub._subscribe(page, subscription)
            self.pages.append(page)

    def rows(self, runs: Sequence[str]) -> dict[str, dict[str, Any]]:
        self.asked.append(list(runs))
        return {run: {**ROW, "state": self.states.get(run, "running")} for run in runs}

    def summaries(self, runs: Sequence[str]) -> list[RunSummary]:
        one = RunSummary(run="", project="p", name="n", state="running", step=1, started="", updated="")
        return [replace(one, run=run, state=self.states.get(run, "running")) for run in runs]  # type: ignore[arg-type]

    def turn(self, after_s: float = 0.0) -> list[list[Any]]:
        """The messages that each page got by one turn of the hub."""
        self.clock.at += after_s
        self.hub._turn(self.hub._topics, self.clock())
        self.hub._hand_over()
        return [[decoded(page.take()) for _ in range(len(page.queue))] for page in self.pages]


def test_a_fleet_is_told_once_a_second_of_runs_that_moved() -> None:
    world = Pages(FLEET)
    world.hub.publish([stored({"loss": [1.0]}, run=run) for run in ("r1", "r2")])
    ((first,),) = world.turn()
    assert list(first["fleet"]) == ["r1", "r2"]
    world.hub.publish([stored({"loss": [2.0]}, first_step=2)])
    assert world.turn(0.5) == [[]]
    ((second,),) = world.turn(0.5)
    assert second == {"fleet": {"r1": {"values": {"loss": 2.0}}}}
    assert world.turn(5.0) == [[]], "nothing moved"
    assert world.asked == [["r1", "r2"], ["r1"]]


def test_a_fleet_of_more_runs_than_fit_a_message_is_told_in_turns() -> None:
    world = Pages(FLEET)
    for begin in range(0, 2500, 500):
        world.hub.publish([stored({"loss": [1.0]}, run=f"r{number}") for number in range(begin, begin + 500)])
    heard: list[str] = []
    for _ in range(3):
        ((message,),) = world.turn(1.0)
        heard += message["fleet"]
    assert heard == [f"r{number}" for number in range(2500)]
    assert world.turn(1.0) == [[]]


def test_a_changed_or_deleted_run_is_told_to_a_fleet_with_no_frame() -> None:
    world = Pages(FLEET)
    summary = world.summaries(["r1"])[0]
    for _ in range(100):
        world.hub.publish_run(summary)
    assert world.turn() == [[{"fleet": {"r1": ROW}}]], "one message, however often a run changes"
    world.hub.forget("r1")
    world.rows = lambda runs: {}  # type: ignore[method-assign, assignment]
    world.hub._rows = world.rows
    assert world.turn(1.0) == [[{"fleet": {"r1": None}}]]


def test_bands_are_dropped_when_the_row_of_a_run_says_that_it_has_ended() -> None:
    world = Pages(Subscription(bands=True))
    (topic,) = world.hub._topics.values()
    assert isinstance(topic.collected, Bands)
    for run in ("ends", "goes-on", "deleted"):
        world.hub.publish([stored({"loss": [1.0]}, run=run)])
    world.turn()
    assert set(topic.collected._of_runs) == {"ends", "goes-on", "deleted"}
    world.states["ends"] = "finished"
    world.hub.publish(
        [replace(stored({"loss": [1.0]}, run="ends", first_step=2), events=[Event(kind="state", time=1.0)])]
    )
    world.hub.forget("deleted")
    world.turn(1.0)
    world.turn(0.1)
    assert set(topic.collected._of_runs) == {"goes-on"}


@pytest.mark.fault
def test_s07_a_fleet_page_that_does_not_read_is_told_that_it_lags_and_then_everything_again() -> None:
    world = Pages(FLEET)
    (page,) = world.pages
    for step in range(1, 70):
        world.hub.publish([stored({"loss": [1.0]}, first_step=step)])
        world.clock.at += 1.0
        world.hub._turn(world.hub._topics, world.clock())
        world.hub._hand_over()
    assert page.queue[0] == LAGGED and len(page.queue) < 64
    assert world.hub.counters["lagged"] == 1
    after = [decoded(message) for message in list(page.queue)[2:]]
    assert after[0]["fleet"]["r1"]["name"] == "mine", "what it has missed is told again"
    assert "name" not in after[1]["fleet"]["r1"]


@pytest.mark.fault
def test_s07_an_inbox_that_is_full_of_bytes_makes_pages_fetch_anew() -> None:
    world = Pages(FLEET, Subscription())
    large = stored({f"metric/{number}": [1.0] * 40_000 for number in range(100)})  # 32 MB
    for _ in range(4):
        world.hub.publish([large])
    assert world.hub._inbox_bytes <= 64 * 2**20
    fleet, run_page = world.turn()
    assert fleet == run_page == [{"lagged": True}]
    assert world.hub._inbox_bytes == 0 and not world.hub._inbox


def test_the_hubs_thread_collects_and_ends_at_stop() -> None:
    async def life() -> tuple[bytes, str]:
        hub = Hub(lambda runs: [], lambda runs: dict.fromkeys(runs, ROW))
        await hub.start()
        page = Page()
        hub._subscribe(page, FLEET)
        hub.publish([stored({"loss": [1.0]})])
        await asyncio.wait_for(page.ready.wait(), 10.0)
        thread = hub._thread
        assert thread is not None and thread is not threading.current_thread()
        await hub.stop()
        assert not thread.is_alive()
        return page.take(), thread.name

    message, name = asyncio.run(life())
    assert decoded(message)["fleet"]["r1"]["values"] == {"loss": 1.0}
    until(lambda: name not in {thread.name for thread in threading.enumerate()})


def test_a_failure_while_a_fleet_is_read_makes_pages_fetch_anew_and_the_hub_goes_on() -> None:
    async def life() -> list[Any]:
        answers = iter([OSError("the database is away"), None])

        def rows(runs: Sequence[str]) -> dict[str, dict[str, Any]]:
            failure = next(answers, None)
            if failure is not None:
                raise failure
            return dict.fromkeys(runs, ROW)

        clock = Clock(100.0)
        hub = Hub(lambda runs: [], rows, clock=clock)
        await hub.start()
        page = Page()
        hub._subscribe(page, FLEET)
        got = []
        for step in (1, 2):
            clock.at += 1.0
            hub.publish([stored({"loss": [1.0]}, first_step=step)])
            await asyncio.wait_for(page.ready.wait(), 10.0)
            got.append(decoded(page.take()))
        await hub.stop()
        assert hub.counters["errors"] == 1
        return got

    lagged, message = asyncio.run(life())
    assert lagged == {"lagged": True}
    assert message["fleet"]["r1"]["name"] == "mine"
