"""Rules on the cores of a machine: cpu_oversubscribed, cpu_bottleneck, dataloader_workers, and batch_too_small."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from judging import START, Judged, frame, restored, state

from perfagent.wire import Finding
from perfagent_server.rules.rule import Rule
from perfagent_server.rules.speed.batch_too_small import BatchTooSmall
from perfagent_server.rules.speed.cpu_bottleneck import CpuBottleneck
from perfagent_server.rules.speed.cpu_oversubscribed import CpuOversubscribed
from perfagent_server.rules.speed.data_bound import DataBound
from perfagent_server.rules.speed.dataloader_workers import DataloaderWorkers

Readings = Mapping[str, float] | Callable[[int], Mapping[str, float]]
"""By the second."""
COMPUTE = {"phase/forward_s": 0.3, "phase/backward_s": 0.6, "phase/data_s": 0.02, "phase/other_s": 0.08}
SLOW = ("host/cpu_pressure_pct", "host/cpu_throttled_pct", "host/cores", "process/workers")
"""Read every five seconds."""


class Machine(Judged):
    """Ranks that make a step a second."""

    def __init__(self, *rules: Rule, ranks: int = 1) -> None:
        super().__init__(rules)
        self.evaluator.start_clock(START)
        self.second, self._ranks = 0, ranks
        for rank in range(ranks if ranks > 1 else 0):
            self.evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=ranks)]))

    def go_on(self, seconds: int, *readings: Readings, phases: Mapping[str, float] = COMPUTE) -> Machine:
        """readings: of each rank. The server is started again before."""
        self.evaluator = restored(self.evaluator)
        self.evaluator.start_clock(START + self.second)
        for _ in range(seconds):
            self.second += 1
            for rank in range(self._ranks):
                told = readings[rank](self.second) if callable(one := readings[rank]) else one
                due = {name: value for name, value in told.items() if self.second % 5 == 0 or name not in SLOW}
                for columns in ({"step_time_s": 1.0, **phases}, due):
                    values, ident = {name: [value] for name, value in columns.items()}, self.evaluator.upto + 1
                    stored = frame(values, [self.second], rank=rank, ident=ident, step_s=1.0)
                    self.changes += self.evaluator.take(stored)
            self.changes += self.evaluator.tick(START + self.second)
        return self

    @property
    def found(self) -> list[Finding]:
        return [change.finding for change in self.fired]


def found(rule: Rule, readings: Readings, seconds: int = 280, phases: Mapping[str, float] = COMPUTE) -> list[Finding]:
    return Machine(rule).go_on(seconds, readings, phases=phases).found


def told(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(one.severity, one.cause) for one in findings]


OWN = {
    "host/cpu_pressure_pct": 80.0, "host/cores": 4.0, "host/cpu_pct": 98.0, "process/cpu_pct": 380.0, "process/threads": 20.0,
}  # fmt: skip
QUOTA = {"host/cores": 4.0, "host/cpu_pct": 6.0, "process/cpu_pct": 390.0}


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ({**OWN, "host/cpu_pressure_pct": 70.0}, [("warning", "")]),
        ({**OWN, "host/cpu_pressure_pct": 69.0}, [("info", "")]),
        ({**OWN, "host/cpu_pressure_pct": 40.0}, [("info", "")]),
        ({**OWN, "host/cpu_pressure_pct": 39.0}, []),
        ({**OWN, "process/cpu_pct": 295.0}, [("warning", "")]),
        ({**OWN, "process/cpu_pct": 293.0}, [("info", "other programs")]),
        ({**OWN, "process/cpu_pct": 190.0, "process/workers_cpu_pct": 190.0}, [("warning", "workers")]),
        ({**OWN, "process/cpu_pct": 191.0, "process/workers_cpu_pct": 189.0}, [("warning", "")]),
        ({**QUOTA, "host/cpu_throttled_pct": 25.0}, [("warning", "quota")]),
        ({**QUOTA, "host/cpu_throttled_pct": 24.0}, [("info", "quota")]),
        ({**QUOTA, "host/cpu_throttled_pct": 9.9}, []),
        ({**OWN, "gpu/utilization_pct": 89.0}, [("warning", "")]),
        ({**OWN, "gpu/utilization_pct": 90.0}, []),
        (QUOTA, []),
        (lambda second: {**OWN, "host/cpu_pressure_pct": 95.0 if second % 60 < 10 else 5.0}, []),
    ],
    ids=[
        "much", "some", "a little", "less", "own: three quarters", "others", "workers: half", "fewer", "quota", "quota: less",
        "quota: a tenth", "GPUs that wait", "busy GPUs", "no pressure known", "short bursts",
    ],
)  # fmt: skip
def test_pressure_on_the_cores_is_told_by_whose_it_is(readings: Readings, expected: list[tuple[str, str]]) -> None:
    findings = found(CpuOversubscribed(), readings)
    assert told(findings) == expected
    for one in findings:
        sets = one.cause in ("", "quota")
        assert one.fix.startswith("Set OMP_NUM_THREADS=4 here. ") == sets
        assert one.evidence["whose"] == ("others" if one.cause == "other programs" else "own")
        assert one.evidence["cores"] == 4


def test_ranks_share_the_cores_of_their_node() -> None:
    own = {"process/cpu_pct": 95.0, "process/threads": 6.0}
    host = {name: value for name, value in OWN.items() if name.startswith("host/")}
    [one] = Machine(CpuOversubscribed(), ranks=4).go_on(150, {**host, **own}, own, own, own).found
    assert (one.evidence["omp_num_threads"], one.evidence["threads"], one.ranks) == (1, 24, [0, 1, 2, 3])


def test_an_alert_on_cores_outlives_a_restart_and_is_resolved() -> None:
    job = Machine(CpuOversubscribed()).go_on(140, OWN)
    assert job.go_on(200, {**OWN, "host/cpu_pressure_pct": 3.0}).kinds == ["fire", "resolve"]


BUSY = {"host/cpu_pct": 97.0, "host/cores": 8.0, "process/cpu_pct": 100.0, "process/workers_cpu_pct": 660.0}


def pulsing(second: int) -> Mapping[str, float]:
    """A loader that delivers now and then."""
    return {**BUSY, "gpu/utilization_pct": 95.0 if second % 3 == 0 else 0.0}


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ({**BUSY, "gpu/utilization_pct": 29.0}, [("warning", "data")]),
        ({**BUSY, "gpu/utilization_pct": 30.0}, []),
        (pulsing, [("warning", "data")]),
        (lambda second: {**BUSY, "gpu/utilization_pct": 95.0 if second % 5 < 3 else 0.0}, []),
        ({**BUSY, "process/workers_cpu_pct": 100.0, "gpu/utilization_pct": 15.0}, [("info", "other programs")]),
        ({**BUSY, "process/cpu_pct": 700.0, "process/workers_cpu_pct": 60.0, "gpu/utilization_pct": 15.0}, [("warning", "")]),
        (BUSY, []),
        ({**BUSY, "host/cpu_pct": 90.0, "process/workers_cpu_pct": 300.0, "gpu/utilization_pct": 5.0}, []),
    ],
    ids=["idle GPUs", "busier", "two of three", "two of five", "others", "its own", "a training on the CPU", "cores to spare"],
)  # fmt: skip
def test_gpus_that_idle_while_all_cores_are_busy_are_told(readings: Readings, expected: list[tuple[str, str]]) -> None:
    findings = found(CpuBottleneck(), readings)
    assert told(findings) == expected
    if expected == [("warning", "data")]:
        assert findings[0].evidence["workers_cores"] == pytest.approx(6.6)
        assert findings[0].evidence["samples_pct"] == pytest.approx(67 if readings is pulsing else 100, abs=2)


MACHINE = {"host/cpu_pct": 60.0, "host/cores": 8.0, "process/cpu_pct": 100.0}


def loaders(workers: float | None, cores: float = 8.0) -> Mapping[str, float]:
    return {**MACHINE, "host/cores": cores} | ({} if workers is None else {"process/workers": workers})


def waiting(seconds: float) -> Mapping[str, float]:
    return {"phase/data_s": seconds, "phase/forward_s": 1.0 - seconds, "phase/other_s": 0.0}


@pytest.mark.parametrize(
    ("workers", "cores", "wait_s", "expected", "advised"),
    [
        (2.0, 8.0, 0.5, [("warning", "too few")], 4),
        (None, 8.0, 0.101, [("info", "too few")], 2),
        (None, 8.0, 0.09, [], None),
        (None, 1.0, 0.5, [], None),  # no more than there are cores
        (None, 64.0, 0.5, [("warning", "too few")], 2),  # loading in the process: two hide a wait of half the step
        (16.0, 8.0, 0.02, [("info", "")], 7),
        (9.0, 8.0, 0.5, [("warning", "")], 7),
        (7.0, 8.0, 0.5, [], None),
    ],
)
def test_workers_that_do_not_fit_the_cores_are_told(
    workers: float | None, cores: float, wait_s: float, expected: list[tuple[str, str]], advised: int | None
) -> None:
    readings = loaders(workers, cores) | {"host/cpu_pct": 95.0}
    findings = found(DataloaderWorkers(), readings, 100, waiting(wait_s))
    assert told(findings) == expected
    for one in findings:
        assert one.evidence["advised_workers"] == advised
        assert one.fix.startswith(f"Set num_workers={advised} here ({workers or 0:.0f} now")
        assert one.fix.count("num_workers") == 1, "one number, of this machine"


@pytest.mark.parametrize(("workers", "wait_s"), [(0.0, 0.15), (2.0, 0.8), (6.0, 0.8)])
def test_both_rules_on_a_wait_are_one_alert_with_one_number(workers: float, wait_s: float) -> None:
    job = Machine(DataBound(), DataloaderWorkers()).go_on(100, loaders(workers, 64.0), phases=waiting(wait_s))
    one, other = (one.fix.partition("num_workers=")[2].partition(" ")[0] for one in job.evaluator.findings())
    assert (one, [one.rule for one in job.found]) == (other, ["data_bound"])


@pytest.mark.parametrize(
    ("workers", "busy", "causes", "advised"),
    [
        (16.0, 97.0, [("data_bound", "too many workers"), ("dataloader_workers", "")], 1),
        (16.0, 70.0, [("data_bound", "no core is free")], None),
        (1.0, 97.0, [("data_bound", "no core is free")], None),
    ],
)
def test_fewer_workers_are_advised_only_where_no_core_idles(
    workers: float, busy: float, causes: list[tuple[str, str]], advised: int | None
) -> None:
    readings = loaders(workers, 2.0) | {"host/cpu_pct": busy}
    job = Machine(DataBound(), DataloaderWorkers()).go_on(100, readings, phases=waiting(0.6))
    assert [(one.rule, one.cause) for one in job.evaluator.findings()] == causes
    assert {one.evidence.get("advised_workers") for one in job.evaluator.findings()} == {advised}


@pytest.mark.parametrize(
    ("workers", "every", "wait_s", "causes"),
    [
        (2.0, 30, 15.0, ["epochs begin"]),
        (2.0, 30, 5.2, []),
        (None, 30, 15.0, []),
        (2.0, 80, 40.0, ["epochs begin"]),
        (2.0, 0, 15.0, []),
        (16.0, 16, 15.0, ["no core is free"]),
    ],
    ids=["each epoch", "a sixth of the time", "no workers", "long epochs", "no epoch", "workers that deliver together"],
)
def test_waits_at_the_beginning_of_epochs_are_told(
    workers: float | None, every: int, wait_s: float, causes: list[str]
) -> None:
    machine = Machine(DataBound())
    for second in range(400):
        wait = wait_s if second % (every or 30) == 0 else 0.01
        epoch = {"batch/epoch": second // every + 1.0} if every > 16 and second % every == 0 else {}
        phases = {**waiting(0.0), **epoch, "phase/data_s": wait, "step_time_s": 1.0 + wait}
        machine.go_on(1, loaders(workers), phases=phases)
    assert [one.cause for one in machine.found] == causes


@pytest.mark.parametrize(
    ("workers", "busy", "uses", "wait_s", "severity"),
    [
        (1.0, 100.0, 40.0, 0.34, "info"), (1.0, 100.0, 40.0, 0.45, "warning"), (1.0, 70.0, 40.0, 0.34, "warning"),
        (1.0, 100.0, 5.0, 0.34, "warning"), (0.0, 100.0, 40.0, 0.34, "warning"),
    ],
)  # fmt: skip
def test_waits_no_longer_than_what_others_took_are_theirs(
    workers: float, busy: float, uses: float, wait_s: float, severity: str
) -> None:
    readings = loaders(workers, 2.0) | {"host/cpu_pct": busy, "process/cpu_pct": 90.0, "process/workers_cpu_pct": uses}
    assert [one.severity for one in found(DataBound(), readings, 80, waiting(wait_s))] == [severity]


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [(0.08, 0.0, []), (0.08, 0.15, [70]), (0.2, 0.0, [25])],
    ids=["a cold cache", "every epoch", "it goes on"],
)
def test_waits_of_the_first_epoch_alone_are_none_of_the_run(first: float, later: float, expected: list[int]) -> None:
    machine = Machine(DataBound())
    for step in range(300):
        wait = first if step < 60 else later
        epoch = {"batch/epoch": step // 60 + 1.0} if step % 60 == 0 else {}
        machine.go_on(
            1, loaders(2.0), phases={**waiting(0.0), **epoch, "phase/data_s": wait, "step_time_s": 1.0 + wait}
        )
    assert [one.since_step for one in machine.found] == expected


CARD = {
    "gpu/utilization_pct": 69.0, "gpu/memory_total_bytes": 80e9, "cuda/peak_allocated_bytes": 55e9, "host/cpu_pct": 69.0,
    "host/cores": 32.0, "process/cpu_pct": 100.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "wait_s", "fires"),
    [
        ({}, 0.25, True),
        ({"cuda/peak_allocated_bytes": 56e9}, 0.0, False),
        ({"gpu/utilization_pct": 70.0}, 0.0, False),
        ({"host/cpu_pct": 70.0}, 0.0, False),
        ({}, 0.31, False),
    ],
    ids=["room for all", "memory", "GPU", "CPU", "it waits for data"],
)
def test_a_gpu_with_room_and_time_for_a_larger_batch_is_a_remark(
    more: Mapping[str, float], wait_s: float, fires: bool
) -> None:
    findings = found(BatchTooSmall(), {**CARD, **more}, 640, waiting(wait_s))
    assert told(findings) == ([("info", "")] if fires else [])
    assert all(one.evidence["room_times"] == pytest.approx(80 / 55) for one in findings)
