"""throttling, ecc and link_errors, on made-up series: only what happens during the run counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from over_time import Job, every

from perfagent_server.rules.hardware.ecc import Ecc
from perfagent_server.rules.hardware.link_errors import LinkErrors
from perfagent_server.rules.hardware.throttling import Throttling

# ---- throttling


def clocks(**pct: float) -> Callable[[float], dict[str, float]]:
    """Of the newest minute from the 100th second on, and nothing before."""
    reasons = ("sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "power_brake")

    def readings(now: float) -> dict[str, float]:
        found = {f"gpu/throttle_{reason}_pct": pct.get(reason, 0.0) if now >= 100 else 0.0 for reason in reasons}
        held = any(value for reason, value in pct.items() if reason in reasons[1:]) and now >= 100
        hot = pct.get("temperature", 70.0)
        return {**found, "gpu/temperature_c": hot, "gpu/sm_clock_mhz": 1200.0 if held else 1755.0}

    return readings


@pytest.mark.parametrize(
    ("held", "severity", "says"),
    [
        ({"sw_thermal": 40}, "warning", "by the driver, because of heat"),
        ({"hw_slowdown": 60, "hw_thermal": 60}, "critical", "by the hardware, because of heat"),
        ({"hw_slowdown": 50}, "critical", "by the hardware."),
        ({"hw_slowdown": 30, "power_brake": 30}, "critical", "by the machine's power supply"),
        ({"temperature": 88.0}, "info", "had 88 °C over the newest minute"),
        ({"sw_power_cap": 100}, None, ""),
        ({"sw_thermal": 5}, None, ""),
        ({"temperature": 80.0}, None, ""),
    ],
)
def test_heat_warns_and_hardware_that_slows_down_is_critical(
    held: dict[str, float], severity: str | None, says: str
) -> None:
    job = Job(Throttling(), steps=every(0.2))
    job.go_on(260, clocks(**held))
    findings = job.evaluator.findings()
    assert [found.severity for found in findings] == ([severity] if severity else [])
    assert len(job.fired) == len(findings)
    for found in findings:
        assert says in found.message
        if severity != "info":
            assert "Its clock is 1,200 MHz; it was 1,755 MHz." in found.message


def test_the_rank_that_all_others_wait_for_is_named_and_the_alert_ends_with_the_heat() -> None:
    job = Job(Throttling(), steps=every(0.2), ranks=4)
    cool = clocks()
    job.go_on(250, cool, cool, clocks(sw_thermal=80), cool)
    [change] = job.fired
    assert change.finding.ranks == [2]
    assert "All other ranks wait for it." in change.finding.message
    job.go_on(300, cool)
    assert [one.kind for one in job.changes if one.kind != "update"] == ["fire", "resolve"]


def test_a_moment_of_heat_is_no_throttling() -> None:
    job = Job(Throttling(), steps=every(0.2))
    job.go_on(
        600, lambda now: {"gpu/throttle_sw_thermal_pct": 100.0 if now % 60 < 4 else 0.0, "gpu/temperature_c": 79.0}
    )
    assert job.changes == []


# ---- ecc

PAST = {
    "gpu/ecc_uncorrected_volatile": 0.0, "gpu/ecc_uncorrected_aggregate": 7.0, "gpu/ecc_corrected_volatile": 12.0,
    "gpu/ecc_corrected_aggregate": 9e7, "gpu/remapped_rows_uncorrected": 2.0, "gpu/remapped_rows_corrected": 5.0,
    "gpu/retired_pages_single": 11.0, "gpu/retired_pages_double": 1.0, "gpu/remap_pending": 0.0, "gpu/remap_failed": 0.0,
}  # fmt: skip


def memory(**more: float) -> Callable[[float], dict[str, float]]:
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
        ({"ecc_corrected_volatile": 6e7}, "warning"),
        ({"ecc_corrected_volatile": 1000}, None),
        ({"remapped_rows_corrected": 1}, "info"),
    ],
)
def test_only_what_a_counter_gains_during_the_run_counts(gained: dict[str, float], severity: str | None) -> None:
    job = Job(Ecc(), steps=every(0.2))
    job.go_on(200, memory(**gained))
    findings = job.evaluator.findings()
    assert [found.severity for found in findings] == ([severity] if severity else [])
    for found in findings:
        assert found.since_step == pytest.approx(490, abs=60)
    job.go_on(600, memory(**gained))
    assert len(job.fired) == len(findings)


def test_volatile_and_aggregate_counts_of_one_error_are_told_once() -> None:
    job = Job(Ecc(), steps=every(0.2), ranks=2)
    job.go_on(200, memory(), memory(ecc_uncorrected_volatile=1, ecc_uncorrected_aggregate=1))
    [change] = job.fired
    assert change.finding.message == "On the GPU of rank 1: 1 uncorrected memory errors during the run."
    assert (change.finding.ranks, "the checkpoint before" in change.finding.fix) == ([1], True)


def test_a_row_that_waited_before_the_run_is_a_warning() -> None:
    job = Job(Ecc(), steps=every(0.2))
    job.go_on(100, lambda _: {**PAST, "gpu/remap_pending": 1.0})
    assert [(change.finding.severity, change.finding.cause) for change in job.fired] == [("warning", "pending")]


def test_a_counter_that_goes_back_begins_anew() -> None:
    job = Job(Ecc(), steps=every(0.2))
    job.go_on(300, lambda now: {"gpu/ecc_uncorrected_aggregate": 5.0 if now < 100 else 0.0})
    assert job.changes == []


def test_other_gpus_of_the_node_are_not_this_runs() -> None:
    job = Job(Ecc(), LinkErrors(), Throttling(), steps=every(0.2))
    job.go_on(
        200,
        lambda now: {
            "node_gpu3/ecc_uncorrected_volatile": now, "node_gpu3/nvlink_replay_errors": now,
            "node_gpu3/throttle_hw_slowdown_pct": 100.0, "node_gpu3/remap_failed": 1.0,
        },
    )  # fmt: skip
    assert job.changes == []


# ---- link_errors


def links(**values: Callable[[float], float]) -> Callable[[float], dict[str, float]]:
    usual: dict[str, Callable[[float], float]] = {
        "nvlink_replay_errors": lambda _: 4.0, "nvlink_crc_flit_errors": lambda _: 120.0, "pcie_replays": lambda _: 30.0,
        "pcie_link_width": lambda _: 16.0, "pcie_link_generation": lambda _: 5.0, "utilization_min_pct": lambda _: 80.0,
    }  # fmt: skip
    return lambda now: {
        f"gpu/{name}": value(now)
        for name, value in {**usual, **values}.items()
        if name == "utilization_min_pct" or now % 10 < 1
    }


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, ""),
        ({"nvlink_replay_errors": lambda now: 4.0 + (now > 100)}, "1 NVLink replay errors during the run"),
        ({"nvlink_crc_flit_errors": lambda now: 120 + max(0, now - 100)}, "NVLink flow control errors during the run"),
        ({"pcie_replays": lambda now: 30 + now // 3}, "20 PCIe transfers a minute are repeated"),
        ({"pcie_replays": lambda now: 30 + now // 20}, ""),
        ({"pcie_replays": lambda now: 5000 - 4900 * (now > 100)}, ""),  # reset
        ({"pcie_link_width": lambda now: 16.0 if now < 100 else 8.0}, "its PCIe link is down to 8 lanes from 16"),
        ({"pcie_link_generation": lambda now: 5.0 if now < 100 else 3.0}, "down to generation 3 from 5"),
        ({"pcie_link_generation": lambda now: 5.0 if now % 60 < 40 else 1.0}, ""),  # two readings at most
        (
            {"pcie_link_generation": lambda now: 5.0 if now < 100 else 1.0, "utilization_min_pct": lambda _: 0.0}, "",
        ),  # idle
    ],
)  # fmt: skip
def test_links_that_have_errors_or_run_below_what_they_did(
    values: dict[str, Callable[[float], float]], says: str
) -> None:
    job = Job(LinkErrors(), steps=every(0.2))
    job.go_on(300, links(**values))
    assert [change.finding.severity for change in job.fired] == (["warning"] if says else [])
    for found in job.evaluator.findings():
        assert says in found.message
