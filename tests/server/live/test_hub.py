"""The parts of the live hub alone: what is kept of a run, and for how long; what a fleet is told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from clocks import Clock

from perfagent.wire import Event, Group, RunSummary
from perfagent_server.live.bands import Bands
from perfagent_server.live.fleet import Fleet
from perfagent_server.live.hub import Hub
from perfagent_server.live.page import LAGGED, Page
from perfagent_server.live.subscription import Subscription
from perfagent_server.store.stored import Stored

FLEET = Subscription(names=frozenset(("loss", "tokens_per_s")), fleet=True)
BANDS = Subscription(bands=True)
ROW = {"name": "mine", "state": "running", "step": 1}


def stored(
    run: str = "r1", *, rank: int = 0, attempt: int = 1, first_step: int = 1, **values: float | list[float]
) -> Stored:
    columns = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    steps = list(range(first_step, first_step + len(next(iter(columns.values())))))
    times = [float(step) for step in steps]
    group = Group(steps, times, times, columns)  # type: ignore[arg-type]
    return Stored(1, run, attempt, rank, f"{run}-{rank}", first_step, 0.0, [group], [])


def decoded(message: bytes | None) -> Any:
    assert message is not None
    return msgspec.json.decode(message)


# --- fleet --------------------------------------------------------------------------------------------------------------


def told(fleet: Fleet, **rows: dict[str, Any]) -> dict[str, Any]:
    change: dict[str, Any] = decoded(fleet.message(list(rows), rows))["fleet"]
    return change


def test_a_fleet_is_told_what_has_changed_of_the_names_it_wants() -> None:
    fleet = Fleet(FLEET)
    fleet.add(stored(loss=[3.0, 2.0], lr=[0.1, 0.1]))
    fleet.add(stored(loss=1.5, first_step=3))
    fleet.add(stored(loss=9.0, first_step=2))  # an older row that comes late
    assert told(fleet, r1=ROW) == {"r1": {**ROW, "values": {"loss": 1.5}}}
    fleet.add(stored(loss=1.5, first_step=4))
    assert told(fleet, r1={**ROW, "step": 4}) == {"r1": {"step": 4, "values": {"loss": 1.5}}}
    lost = {**ROW, "step": 4, "state": "lost"}
    assert told(fleet, r1=lost) == {"r1": {"state": "lost"}}
    fleet.tell_all()  # a page has come
    assert [told(fleet, r1=lost) for _ in range(2)] == [{"r1": lost}, {"r1": {}}]


def test_a_fleet_puts_ranks_together_as_the_catalogue_says() -> None:
    fleet = Fleet(FLEET)
    for rank in range(3):
        fleet.add(stored(loss=float(rank), tokens_per_s=10.0, rank=rank, first_step=100))
    assert told(fleet, r1=ROW)["r1"]["values"] == {"loss": 1.0, "tokens_per_s": 30.0}
    fleet.add(stored(loss=math.nan, rank=1, first_step=101))
    assert told(fleet, r1=ROW)["r1"]["values"] == {"loss": "NaN"}, "one rank's NaN is the run's"
    fleet.add(stored(tokens_per_s=7.0, attempt=2))
    fleet.add(stored(tokens_per_s=99.0, rank=1, first_step=102))  # the spool of the older attempt comes late
    assert told(fleet, r1=ROW)["r1"]["values"] == {"tokens_per_s": 7.0}


# --- the hub ------------------------------------------------------------------------------------------------------------


class Pages:
    """A hub that is not started, with pages that have no socket: each turn is called here."""

    def __init__(self, *subscriptions: Subscription) -> None:
        self.clock, self.deleted = Clock(100.0), False
        self.states: dict[str, str] = {}
        self.asked: list[list[str]] = []
        self.hub = Hub(self.summaries, self.rows, clock=self.clock)
        self.hub._call_loop = lambda function, *arguments: function(*arguments)  # type: ignore[method-assign]
        self.pages = [Page() for _ in subscriptions]
        for page, subscription in zip(self.pages, subscriptions, strict=True):
            self.hub._subscribe(page, subscription)

    def rows(self, runs: Sequence[str]) -> dict[str, dict[str, Any]]:
        self.asked.append(list(runs))
        return {run: {**ROW, "state": self.states.get(run, "running")} for run in runs if not self.deleted}

    def summaries(self, runs: Sequence[str]) -> list[RunSummary]:
        one = RunSummary(run="", project="p", name="n", state="running", step=1, started="", updated="")
        return [replace(one, run=run, state=self.states.get(run, "running")) for run in runs]  # type: ignore[arg-type]

    def publish(self, *runs: str, **values: Any) -> None:
        self.hub.publish([stored(run, **values) for run in runs])

    def turn(self, after_s: float = 0.0) -> None:
        self.clock.at += after_s
        self.hub._turn(self.hub._topics, self.clock())
        self.hub._hand_over()

    def got(self, after_s: float = 0.0) -> list[list[Any]]:
        """The messages that each page got by one turn of the hub."""
        self.turn(after_s)
        return [[decoded(page.take()) for _ in range(len(page.queue))] for page in self.pages]


def test_a_fleet_is_told_once_a_second_of_runs_that_moved() -> None:
    world = Pages(FLEET)
    world.publish("r1", "r2", loss=1.0)
    ((first,),) = world.got()
    assert list(first["fleet"]) == ["r1", "r2"]
    world.publish("r1", loss=2.0, first_step=2)
    assert [world.got(0.5), world.got(0.5)] == [[[]], [[{"fleet": {"r1": {"values": {"loss": 2.0}}}}]]]
    assert world.got(5.0) == [[]], "nothing moved"
    assert world.asked == [["r1", "r2"], ["r1"]]


def test_bands_are_dropped_when_a_run_has_ended_or_is_deleted() -> None:
    world = Pages(BANDS)
    (topic,) = world.hub._topics.values()
    assert isinstance(topic.collected, Bands)
    world.publish("ends", "goes-on", "deleted", loss=1.0)
    world.turn()
    assert set(topic.collected._of_runs) == {"ends", "goes-on", "deleted"}
    world.states["ends"] = "finished"
    world.hub.publish([replace(stored("ends", loss=1.0, first_step=2), events=[Event(kind="state", time=1.0)])])
    world.hub.forget("deleted")
    world.turn(1.0)
    world.turn(0.1)
    assert set(topic.collected._of_runs) == {"goes-on"}


@pytest.mark.fault
def test_s07_fleet_page_that_does_not_read_is_told_all_again() -> None:
    world = Pages(FLEET)
    (page,) = world.pages
    for step in range(1, 70):
        world.publish("r1", loss=1.0, first_step=step)
        world.turn(1.0)
    assert page.queue[0] == LAGGED and len(page.queue) < 64
    assert world.hub.counters["lagged"] == 1
    after = [decoded(message) for message in list(page.queue)[2:]]
    assert after[0]["fleet"]["r1"]["name"] == "mine", "what it has missed is told again"
    assert "name" not in after[1]["fleet"]["r1"]


@pytest.mark.fault
def test_s07_inbox_full_of_bytes_makes_pages_fetch_anew() -> None:
    world = Pages(FLEET, Subscription())
    large = stored("r1", **{f"metric/{number}": [1.0] * 40_000 for number in range(100)})  # type: ignore[arg-type]  # 32 MB
    for _ in range(4):
        world.hub.publish([large])
    assert world.hub._inbox_bytes <= 64 * 2**20
    assert world.got() == [[{"lagged": True}]] * 2
    assert world.hub._inbox_bytes == 0 and not world.hub._inbox
