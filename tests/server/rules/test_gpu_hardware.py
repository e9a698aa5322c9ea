"""throttling, ecc, link_errors and xid, on made-up series: only what happens during the run counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from judging import START, frame, make_evaluator, restored, state
from over_time import Job, Readings, every

from perfagent.wire import Event
from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.hardware.ecc import Ecc
from perfagent_server.rules.hardware.link_errors import LinkErrors
from perfagent_server.rules.hardware.throttling import Throttling
from perfagent_server.rules.hardware.xid import Xid

# ---- throttling

SOFT = ("sw_power_cap",)
HELD = ("hw_slowdown", "sw_thermal", "hw_thermal", "power_brake")


def clocks(temperature: float = 70.0, **pct: float) -> Readings:
    """Held for so much of the time from the 100th second on, and not at all before."""

    def readings(now: float) -> Mapping[str, float]:
        found = {f"gpu/throttle_{one}_pct": pct.get(one, 0.0) if now >= 100 else 0.0 for one in SOFT + HELD}
        held = now >= 100 and any(pct.get(one) for one in HELD)
        return {**found, "gpu/temperature_c": temperature, "gpu/sm_clock_mhz": 1200.0 if held else 1755.0}

    return readings


@pytest.mark.parametrize(
    ("held", "told", "reason"),
    [
        ({"sw_thermal": 10}, [("warning", "")], "sw_thermal"),
        ({"sw_thermal": 9.9}, [], ""),
        ({"hw_slowdown": 60, "hw_thermal": 30}, [("critical", "")], "hw_thermal"),
        ({"hw_slowdown": 60, "hw_thermal": 29}, [("critical", "")], "hw_slowdown"),
        ({"hw_slowdown": 30, "power_brake": 31}, [("critical", "power")], "power_brake"),
        ({"temperature": 85.0}, [("info", "hot")], None),
        ({"temperature": 84.9}, [], ""),
        ({"sw_power_cap": 100}, [], ""),
    ],
)
def test_heat_warns_and_hardware_that_slows_down_is_critical(
    held: dict[str, float], told: list[tuple[str, str]], reason: str | None
) -> None:
    job = Job(Throttling(), steps=every(0.2)).go_on(260, clocks(**held))
    assert job.now_open == told
    assert len(job.fired) == len(told)
    for found in job.evaluator.findings():
        assert found.evidence.get("reason") == reason


def test_the_rank_that_others_wait_for_is_named_until_cool() -> None:
    job, cool = Job(Throttling(), steps=every(0.2), ranks=4), clocks()
    assert job.go_on(250, cool, cool, clocks(sw_thermal=80), cool).found.ranks == [2]
    assert job.go_on(300, cool).kinds == ["fire", "resolve"]


# ---- ecc

PAST = {
    "gpu/ecc_uncorrected_volatile": 0.0, "gpu/ecc_uncorrected_aggregate": 7.0, "gpu/ecc_corrected_volatile": 12.0,
    "gpu/ecc_corrected_aggregate": 9e7, "gpu/remapped_rows_uncorrected": 2.0, "gpu/remapped_rows_corrected": 5.0,
    "gpu/retired_pages_single": 11.0, "gpu/retired_pages_double": 1.0, "gpu/remap_pending": 0.0, "gpu/remap_failed": 0.0,
}  # fmt: skip


def memory(**more: float) -> Readings:
    """Counters as they were before the run, and what they gain in its 100th second."""
    return lambda now: {
        name: value + (more.get(name.removeprefix("gpu/"), 0.0) if now >= 100 else 0.0) for name, value in PAST.items()
    }


@pytest.mark.parametrize(
    ("gained", "severity"),
    [
        ({}, None),
        ({"ecc_uncorrected_volatile": 1, "ecc_uncorrected_aggregate": 1}, "critical"),
        ({"ecc_uncorrected_aggregate": 1}, "critical"),
        ({"remapped_rows_uncorrected": 1}, "critical"),
        ({"retired_pages_double": 1}, "critical"),
        ({"remap_pending": 1}, "critical"),
        ({"remap_failed": 1}, "critical"),
        ({"ecc_corrected_volatile": 5e7}, "warning"),
        ({"ecc_corrected_volatile": 4.9e7}, None),
        ({"remapped_rows_corrected": 1}, "info"),
    ],
)
def test_only_what_a_counter_gains_during_the_run_counts(gained: dict[str, float], severity: str | None) -> None:
    job = Job(Ecc(), steps=every(0.2), every_s=2.0).go_on(200, memory(**gained))
    assert [one for one, _ in job.now_open] == ([severity] if severity else [])
    for found in job.evaluator.findings():
        assert found.since_step == pytest.approx(490, abs=60)
        assert [one["kind"] for one in found.evidence["troubles"]].count("uncorrected") <= 1
    assert len(job.go_on(400, memory(**gained)).fired) == (severity is not None)


def test_a_row_that_waited_before_the_run_is_a_warning() -> None:
    job = Job(Ecc(), steps=every(0.2)).go_on(100, lambda _: {**PAST, "gpu/remap_pending": 1.0})
    assert job.told == [("warning", "pending")]


def test_counters_that_go_back_and_other_gpus_are_no_errors() -> None:
    job = Job(Ecc(), steps=every(0.2)).go_on(200, lambda now: {"gpu/ecc_uncorrected_aggregate": 5.0 * (now < 100)})
    assert job.changes == []
    job = Job(Ecc(), LinkErrors(), Throttling(), steps=every(0.2))
    names = ("ecc_uncorrected_volatile", "nvlink_replay_errors", "throttle_hw_slowdown_pct", "remap_failed")
    assert job.go_on(200, lambda now: {f"node_gpu3/{name}": now for name in names}).changes == []


# ---- link_errors


def links(**values: Callable[[float], float]) -> Readings:
    usual: dict[str, Callable[[float], float]] = {
        "nvlink_replay_errors": lambda _: 4.0, "nvlink_crc_flit_errors": lambda _: 120.0, "pcie_replays": lambda _: 30.0,
        "pcie_link_width": lambda _: 16.0, "pcie_link_generation": lambda _: 5.0, "utilization_min_pct": lambda _: 80.0,
    }  # fmt: skip
    return lambda now: {
        f"gpu/{name}": value(now)
        for name, value in {**usual, **values}.items()
        if name == "utilization_min_pct" or now % 10 < 1
    }


SLOWER = {"pcie_link_generation": lambda now: 5.0 if now < 100 else 3.0}


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({}, None),
        ({"nvlink_replay_errors": lambda now: 4.0 + (now > 100)}, ""),
        ({"nvlink_crc_flit_errors": lambda now: 120 + max(0, now - 100)}, ""),
        ({"pcie_replays": lambda now: 30 + 8 * (now // 60)}, "PCIe"),
        ({"pcie_replays": lambda now: 30 + 7 * (now / 60)}, None),
        ({"pcie_replays": lambda now: 5000 - 4900 * (now > 100)}, None),  # reset
        ({"pcie_link_width": lambda now: 16.0 if now < 100 else 8.0}, "PCIe"),
        (SLOWER, "PCIe"),
        ({"pcie_link_generation": lambda now: 5.0 if now % 60 < 40 else 1.0}, None),  # two readings at most
        ({**SLOWER, "utilization_min_pct": lambda _: 30.0}, "PCIe"),
        ({**SLOWER, "utilization_min_pct": lambda _: 29.0}, None),  # idle
    ],
)
def test_links_that_have_errors_or_run_below_what_they_did(
    values: dict[str, Callable[[float], float]], cause: str | None
) -> None:
    job = Job(LinkErrors(), steps=every(0.2)).go_on(300, links(**values))
    assert job.told == ([] if cause is None else [("warning", cause)])


# ---- xid


def test_an_error_of_the_driver_is_an_alert_until_the_run_ends() -> None:
    def report(rank: int = 0, **data: Any) -> list[Change]:
        event = Event(kind="gpu", time=START + 5, step=None, data=data)
        return evaluator.take(frame({}, [], rank=rank, ident=evaluator.upto + 1, events=[event]))

    evaluator = make_evaluator()
    evaluator.take(frame({"loss": [2.0] * 20}, range(1, 21), events=[state("starting", world_size=2)]))
    for odd in ({"what": "xid"}, {"what": "xid", "code": "x"}, {"what": "lost", "code": 79}, {}):
        assert report(**odd) == []
    [change] = report(what="xid", code=13, index=0)
    found = change.finding
    assert found.evidence["meaning"] == "graphics engine exception"
    assert (found.rule, found.severity, found.cause, found.since_step) == ("xid", "warning", "the program", 20)
    evaluator = restored(evaluator)
    assert report(what="found", gpus=[]) == []
    [worse] = report(rank=1, what="xid", code=79, index=1)
    assert (worse.kind, worse.finding.severity, worse.finding.ranks) == ("update", "critical", [0, 1])
    assert (worse.finding.cause, worse.finding.evidence["code"]) == ("fallen off the bus", 79)
    assert worse.finding.fix == Xid().text().remedies["fallen off the bus"]
    assert evaluator.verdict().rule == "xid"
