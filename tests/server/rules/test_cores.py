"""Rules on the cores of a machine: cpu_oversubscribed, cpu_bottleneck, dataloader_workers, and batch_too_small."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
from judging import START, fired, frame, make_evaluator, restored, state

from perfagent.wire import Finding
from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.rule import Rule
from perfagent_server.rules.speed.batch_too_small import BatchTooSmall
from perfagent_server.rules.speed.cpu_bottleneck import CpuBottleneck
from perfagent_server.rules.speed.cpu_oversubscribed import CpuOversubscribed
from perfagent_server.rules.speed.data_bound import DataBound
from perfagent_server.rules.speed.dataloader_workers import DataloaderWorkers

Readings = Callable[[int], Mapping[str, float]]
COMPUTE = {"phase/forward_s": 0.3, "phase/backward_s": 0.6, "phase/data_s": 0.02, "phase/other_s": 0.08}


def go_on(
    evaluator: Evaluator,
    seconds: range,
    readings: Mapping[str, float] | Readings,
    *,
    phases: Mapping[str, float] = COMPUTE,
    rank: int = 0,
    slow: Sequence[str] = ("host/cpu_pressure_pct", "host/cpu_throttled_pct", "host/cores", "process/workers"),
) -> list[Change]:
    """A step a second, and readings; slow: those that are read every five seconds."""
    changes: list[Change] = []
    for second in seconds:
        told = readings(second) if callable(readings) else readings
        columns = {"step_time_s": [1.0], **{name: [value] for name, value in phases.items()}}
        changes += evaluator.take(
            frame(columns, [second], rank=rank, ident=evaluator.upto + 1, step_s=1.0, received=START + second)
        )
        due = {name: [value] for name, value in told.items() if second % 5 == 0 or name not in slow}
        if due:
            changes += evaluator.take(
                frame(due, [second], rank=rank, ident=evaluator.upto + 1, step_s=1.0, received=START + second)
            )
        changes += evaluator.tick(START + second)
    return changes


def found(rule: Rule, readings: Mapping[str, float] | Readings, seconds: int = 280, **rest: object) -> list[Finding]:
    evaluator = make_evaluator(rules=(rule,))
    evaluator.start_clock(START)
    return [change.finding for change in fired(go_on(evaluator, range(1, seconds), readings, **rest))]  # type: ignore[arg-type]


# ---- cpu_oversubscribed

OWN = {
    "host/cpu_pressure_pct": 80.0, "host/cores": 4.0, "host/cpu_pct": 98.0, "process/cpu_pct": 380.0, "process/threads": 20.0,
}  # fmt: skip


def test_too_many_threads_of_the_run_are_its_own_load_with_the_number_for_this_machine() -> None:
    [one] = found(CpuOversubscribed(), OWN)
    assert (one.severity, one.cause, one.evidence["whose"]) == ("warning", "", "own")
    assert one.fix.startswith("Set OMP_NUM_THREADS=4 here. ")
    assert (
        "some task had to wait for a core for 80 % of the time: of 4 cores 3.9 were busy, 3.8 by the run and 0.12 by others, "
        "so it is the load of the run itself; the run has 20 threads." in one.message
    )
    assert (
        "forward, backward and optimizer take 90 % of a step (P50 1 s, P90 1 s, of the newest 48 steady steps)"
        in one.message
    )


def test_the_load_of_others_is_a_remark_and_nothing_the_run_could_set() -> None:
    [one] = found(CpuOversubscribed(), {**OWN, "process/cpu_pct": 90.0})
    assert (one.severity, one.cause, one.evidence["whose"]) == ("info", "other programs", "others")
    assert one.title == "Other programs use 3 of 4 cores: tasks wait 80 % of the time"
    assert "OMP_NUM_THREADS" not in one.fix


def test_loader_workers_that_fill_the_cores_are_named() -> None:
    [one] = found(CpuOversubscribed(), {**OWN, "process/cpu_pct": 100.0, "process/workers_cpu_pct": 280.0})
    assert (one.severity, one.cause) == ("warning", "workers")
    assert "3.8 by the run (2.8 by loader workers)" in one.message


def test_a_quota_that_is_used_up_is_told_whatever_the_rest_of_the_machine_does() -> None:
    readings = {"host/cpu_throttled_pct": 60.0, "host/cores": 4.0, "host/cpu_pct": 6.0, "process/cpu_pct": 390.0}
    [one] = found(CpuOversubscribed(), readings)
    assert (one.severity, one.cause) == ("warning", "quota")
    assert one.title == "The CPU quota of 4 cores is used up in 60 % of its periods"
    assert one.fix.startswith("Set OMP_NUM_THREADS=4 here. ")


def test_ranks_share_the_cores_of_their_node() -> None:
    evaluator = make_evaluator(rules=(CpuOversubscribed(),))
    evaluator.start_clock(START)
    for rank in range(4):
        evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=4)]))
    changes: list[Change] = []
    for second in range(1, 150):
        for rank in range(4):
            host = {name: value for name, value in OWN.items() if name.startswith("host/")} if rank == 0 else {}
            own = {"process/cpu_pct": 95.0, "process/threads": 6.0}
            changes += go_on(evaluator, range(second, second + 1), {**host, **own}, rank=rank)
    [change] = fired(changes)
    assert change.finding.fix.startswith("Set OMP_NUM_THREADS=1 here. ")
    assert change.finding.ranks == [0, 1, 2, 3]
    assert "the run has 24 threads in 4 ranks" in change.finding.message


@pytest.mark.parametrize(
    "readings",
    [
        {**OWN, "host/cpu_pressure_pct": 25.0},
        {**OWN, "gpu/utilization_pct": 96.0},
        {"host/cpu_pct": 98.0, "process/cpu_pct": 380.0, "host/cores": 4.0},
        lambda second: {**OWN, "host/cpu_pressure_pct": 95.0 if second % 60 < 10 else 5.0},
    ],
    ids=["a little pressure", "GPUs that are busy all the time", "no pressure known", "short bursts"],
)
def test_cores_that_hold_nothing_back_are_silent(readings: Mapping[str, float] | Readings) -> None:
    assert found(CpuOversubscribed(), readings, seconds=280) == []


def test_an_alert_on_cores_outlives_a_restart_of_the_server_and_is_resolved() -> None:
    evaluator = make_evaluator(rules=(CpuOversubscribed(),))
    evaluator.start_clock(START)
    assert len(fired(go_on(evaluator, range(1, 140), OWN))) == 1
    evaluator = restored(evaluator)
    evaluator.start_clock(START + 140)
    changes = go_on(evaluator, range(140, 340), {**OWN, "host/cpu_pressure_pct": 3.0})
    assert [change.kind for change in changes if change.kind != "update"] == ["resolve"]


def test_pauses_between_the_steps_keep_no_alert_back() -> None:
    """Evaluations of 25 s after 40 steps: a minute of stepping is never without one."""
    evaluator = make_evaluator(rules=(CpuOversubscribed(),))
    evaluator.start_clock(START)
    changes: list[Change] = []
    for begin in range(1, 400, 65):
        changes += go_on(evaluator, range(begin, begin + 40), OWN, slow=())
        for second in range(begin + 40, begin + 65):
            told = {name: [value] for name, value in OWN.items()}
            changes += evaluator.take(frame(told, [second], ident=evaluator.upto + 1, step_s=1.0))
            changes += evaluator.tick(START + second)
    assert [change.kind for change in changes if change.kind != "update"] == ["fire"]


def test_a_node_that_is_throttled_a_little_hides_none_that_is_short_of_cores() -> None:
    evaluator = make_evaluator(rules=(CpuOversubscribed(),))
    evaluator.start_clock(START)
    for rank in range(2):
        evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=2)]))
    nodes = (
        {**OWN, "host/cpu_pressure_pct": 5.0, "host/cpu_throttled_pct": 0.1},
        {**OWN, "host/cpu_throttled_pct": 0.0},
    )
    changes: list[Change] = []
    for second in range(1, 150):
        for rank, told in enumerate(nodes):
            changes += go_on(evaluator, range(second, second + 1), told, rank=rank)
    [change] = fired(changes)
    assert change.finding.ranks == [1]


def test_a_little_pressure_of_the_run_s_own_is_a_remark() -> None:
    assert [one.severity for one in found(CpuOversubscribed(), {**OWN, "host/cpu_pressure_pct": 50.0})] == ["info"]


# ---- cpu_bottleneck

BUSY = {"host/cpu_pct": 97.0, "host/cores": 8.0, "process/cpu_pct": 100.0, "process/workers_cpu_pct": 660.0}


def test_gpus_that_idle_while_all_cores_are_busy_are_told_with_who_uses_them() -> None:
    waits = {"phase/data_s": 0.7, "phase/forward_s": 0.1, "phase/backward_s": 0.2, "phase/other_s": 0.0}
    [one] = found(CpuBottleneck(), {**BUSY, "gpu/utilization_pct": 15.0}, seconds=280, phases=waits)
    assert (one.severity, one.cause) == ("warning", "data")
    assert "7.6 of them by the run (6.6 by loader workers) and 0.16 by others" in one.message
    assert "Data bounds it: waiting for batches takes 70 % of a step (P50 1 s" in one.message


def test_a_loader_that_delivers_now_and_then_is_found_too() -> None:
    def readings(second: int) -> dict[str, float]:
        return {**BUSY, "gpu/utilization_pct": 95.0 if second % 3 == 0 else 0.0}

    assert len(found(CpuBottleneck(), readings, seconds=280)) == 1


def test_cores_that_others_use_are_a_remark() -> None:
    [one] = found(CpuBottleneck(), {**BUSY, "process/workers_cpu_pct": 100.0, "gpu/utilization_pct": 15.0}, seconds=280)
    assert (one.severity, one.cause) == ("info", "other programs")


@pytest.mark.parametrize(
    "readings",
    [
        BUSY,
        {**BUSY, "gpu/utilization_pct": 80.0},
        {**BUSY, "host/cpu_pct": 60.0, "process/workers_cpu_pct": 300.0, "gpu/utilization_pct": 5.0},
    ],
    ids=["a training on the CPU", "busy GPUs", "cores to spare"],
)  # fmt: skip
def test_no_bottleneck_is_silent(readings: Mapping[str, float]) -> None:
    assert found(CpuBottleneck(), readings, seconds=280) == []


# ---- dataloader_workers

WAITS = {"phase/data_s": 0.5, "phase/forward_s": 0.2, "phase/backward_s": 0.3, "phase/other_s": 0.0}
MACHINE = {"host/cpu_pct": 60.0, "host/cores": 8.0, "process/cpu_pct": 100.0}


def test_too_few_workers_for_a_step_that_waits_are_told_with_how_many_the_cores_have_room_for() -> None:
    [one] = found(DataloaderWorkers(), {**MACHINE, "process/workers": 2.0}, phases=WAITS)
    assert (one.severity, one.cause) == ("warning", "too few")
    assert one.fix.startswith("Set num_workers=4 here (2 now, 8 cores for 1 rank)")
    assert one.fix.count("num_workers") == 1, "one number, of this machine"


@pytest.mark.parametrize(("cores", "advised"), [(1.0, None), (2.0, 1), (4.0, 2), (64.0, 2)])
def test_no_more_workers_are_advised_than_there_are_cores(cores: float, advised: int | None) -> None:
    """The loader loads in the training process: two workers are enough to hide a wait of half the step."""
    findings = found(DataloaderWorkers(), {**MACHINE, "host/cores": cores}, phases=WAITS)
    assert [one.evidence["advised_workers"] for one in findings] == ([] if advised is None else [advised])


def test_many_more_workers_than_cores_are_a_remark_and_a_warning_where_the_step_waits() -> None:
    many = {**MACHINE, "host/cores": 2.0, "process/workers": 16.0}
    [remark] = found(DataloaderWorkers(), many)
    [warning] = found(DataloaderWorkers(), many, phases=WAITS)
    assert (remark.severity, warning.severity) == ("info", "warning")
    assert remark.title == "16 loader workers share 2 cores"
    assert remark.fix.startswith("Set num_workers=1 here (16 now)")
    assert remark.fix.count("num_workers") == 1, "one number, of this machine"


@pytest.mark.parametrize(
    ("workers", "phases"),
    [(None, COMPUTE), (2.0, COMPUTE), (8.0, COMPUTE), (7.0, WAITS)],
    ids=["none are needed", "few are enough", "as many as cores", "no core is left for more"],
)
def test_workers_that_fit_are_silent(workers: float | None, phases: Mapping[str, float]) -> None:
    told = {} if workers is None else {"process/workers": workers}
    assert found(DataloaderWorkers(), {**MACHINE, **told}, phases=phases) == []


def test_where_the_ranks_need_all_cores_no_worker_is_advised() -> None:
    evaluator = make_evaluator(rules=(DataloaderWorkers(),))
    evaluator.start_clock(START)
    for rank in range(2):
        evaluator.take(frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=2)]))
    changes: list[Change] = []
    for second in range(1, 100):
        for rank in range(2):
            told = {"process/cpu_pct": 90.0, "process/workers": 4.0} | (
                {"host/cores": 2.0, "host/cpu_pct": 98.0} if rank == 0 else {}
            )
            changes += go_on(evaluator, range(second, second + 1), told, rank=rank)
    [change] = fired(changes)
    assert change.finding.title == "8 loader workers share 2 cores"
    assert change.finding.fix.startswith("Set num_workers=0 here (4 now), so that each rank loads its batches itself")
    assert change.finding.evidence["advised_workers"] == 0


@pytest.mark.parametrize("workers", [0.0, 2.0, 6.0])
@pytest.mark.parametrize("wait_s", [0.15, 0.3, 0.5, 0.8])
def test_both_rules_on_a_wait_name_the_same_number_of_workers(workers: float, wait_s: float) -> None:
    evaluator = make_evaluator(rules=(DataBound(), DataloaderWorkers()))
    evaluator.start_clock(START)
    phases = {"phase/data_s": wait_s, "phase/forward_s": 1.0 - wait_s, "phase/other_s": 0.0}
    go_on(evaluator, range(1, 100), {**MACHINE, "host/cores": 64.0, "process/workers": workers}, phases=phases)
    one, other = (one.fix.partition("num_workers=")[2].partition(" ")[0] for one in evaluator.findings())
    assert one == other


def test_too_few_workers_are_part_of_the_alert_on_the_wait() -> None:
    evaluator = make_evaluator(rules=(DataBound(), DataloaderWorkers()))
    evaluator.start_clock(START)
    changes = go_on(evaluator, range(1, 100), {**MACHINE, "process/workers": 2.0}, phases=WAITS)
    assert [change.finding.rule for change in fired(changes)] == ["data_bound"]
    assert "With 2 loader workers for a rank the newest" in evaluator.machines["data_bound"].finding.evidence["also"][0]  # type: ignore[union-attr]


# ---- batch_too_small

CARD = {
    "gpu/utilization_pct": 55.0, "gpu/memory_total_bytes": 80e9, "cuda/peak_allocated_bytes": 8e9, "host/cpu_pct": 20.0,
    "host/cores": 32.0, "process/cpu_pct": 100.0,
}  # fmt: skip


def test_a_gpu_with_room_and_time_for_a_larger_batch_is_a_remark() -> None:
    [one] = found(BatchTooSmall(), CARD, seconds=700)
    assert one.severity == "info"
    assert "The peak of GPU memory is 7.45 GiB of 74.5 GiB (10 %)" in one.message
    assert one.evidence["room_times"] == pytest.approx(10)


@pytest.mark.parametrize(
    "more",
    [{"cuda/peak_allocated_bytes": 70e9}, {"gpu/utilization_pct": 92.0}, {"host/cpu_pct": 95.0}],
    ids=["memory", "GPU", "CPU"],
)
def test_what_is_used_much_leaves_no_room(more: Mapping[str, float]) -> None:
    assert found(BatchTooSmall(), {**CARD, **more}, seconds=700) == []


def test_a_gpu_that_waits_for_its_data_needs_no_larger_batch() -> None:
    assert found(BatchTooSmall(), CARD, seconds=400, phases=WAITS) == []
