"""Where the step's time goes: data_bound and low_gpu_utilization."""

from __future__ import annotations

import pytest
from judging import fired, frame, judge_series, make_evaluator, restored, state, told

from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.evidence import spell_s
from perfagent_server.rules.speed.low_gpu_utilization import LowGpuUtilization


def test_a_loader_that_sleeps_is_told_in_words_and_figures_within_a_short_run() -> None:
    steps = 60
    changes, evaluator = judge_series({"step_time_s": [0.06] * steps, "phase/data_s": [0.05] * steps}, rows=10)
    [alert] = fired(changes, "data_bound")
    assert (alert.step, alert.finding.since_step) == (45, 25), "two windows after the first steps"
    assert alert.finding.severity == "critical"
    said = "waiting 50 ms of 60 ms (83 %), medians of the newest 20 steps (P90 of the wait 50 ms):"
    assert said in alert.finding.message
    assert alert.finding.evidence["steps"] == 20
    assert alert.finding.gain_pct == pytest.approx(83.3, abs=0.1)
    for word in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "cache"):
        assert word in alert.finding.fix
    assert evaluator.verdict().rule == "data_bound"


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_of_one_window_has_the_verdict_and_no_alert_yet(ended: bool) -> None:
    changes, evaluator = judge_series({"step_time_s": [0.06] * 30, "phase/data_s": [0.05] * 30})
    if ended:
        changes += evaluator.take(frame({}, [], ident=evaluator.upto + 1, events=[state("finished")]))
    assert changes == []
    assert evaluator.verdict().rule == "data_bound"
    assert restored(evaluator).verdict() == evaluator.verdict()


def test_a_blip_in_a_long_run_is_no_verdict() -> None:
    waits = [0.001] * 200 + [0.05] * 20
    _, evaluator = judge_series({"step_time_s": [0.05 + wait for wait in waits], "phase/data_s": waits})
    assert evaluator.verdict().rule != "data_bound"


def test_the_severity_and_its_figures_follow_the_present_level_once_it_has_held() -> None:
    shares = [0.3] * 100 + [0.11] * 15
    series = {"step_time_s": [0.1] * len(shares), "phase/data_s": [0.1 * one for one in shares]}
    _, evaluator = judge_series(series, rows=5)
    before = evaluator.verdict()
    assert before.severity == "critical"
    assert before.evidence["share_pct"] >= 20
    judge_series(
        {"step_time_s": [0.1] * 700, "phase/data_s": [0.011] * 700}, first_step=116, rows=5, evaluator=evaluator
    )
    after = evaluator.verdict()
    assert (after.severity, round(after.evidence["share_pct"])) == ("warning", 11)


def test_the_verdict_repeats_the_figures_of_the_finding_and_no_others() -> None:
    changes, evaluator = judge_series({"step_time_s": [0.06] * 60, "phase/data_s": [0.05] * 60}, rows=10)
    [alert] = fired(changes, "data_bound")
    found = told(evaluator, {"step_time_s": [0.09] * 100, "phase/data_s": [0.01] * 100})
    assert found.message == alert.finding.message
    assert found.evidence.items() >= alert.finding.evidence.items()


@pytest.mark.parametrize(("wait", "severity"), [(0.009, None), (0.012, "warning"), (0.025, "critical")])
def test_the_share_of_the_wait_decides(wait: float, severity: str | None) -> None:
    changes, _ = judge_series({"step_time_s": [0.1] * 60, "phase/data_s": [wait] * 60})
    assert [change.finding.severity for change in fired(changes)] == ([severity] if severity else [])


def test_tiny_steps_with_a_tiny_wait_are_silent() -> None:
    changes, _ = judge_series({"step_time_s": [0.0015] * 200, "phase/data_s": [0.0005] * 200})
    assert changes == []


def test_the_first_batch_of_an_epoch_is_no_fault() -> None:
    waits = [3.0 if step % 50 == 0 else 0.001 for step in range(300)]
    changes, _ = judge_series({"step_time_s": [0.1 + wait for wait in waits], "phase/data_s": waits})
    assert changes == []


def test_workers_that_deliver_in_bursts_are_found() -> None:
    waits = [0.2 if step % 4 == 0 else 0.0 for step in range(100)]
    machine = {"host/cores": [8.0] * 100, "process/workers": [4.0] * 100}
    changes, _ = judge_series({"step_time_s": [0.05 + wait for wait in waits], "phase/data_s": waits, **machine})
    [alert] = fired(changes, "data_bound")
    assert alert.finding.evidence["share_pct"] == pytest.approx(50.0)


@pytest.mark.parametrize("rows", [7, 80, 300, 2000])
def test_a_loader_that_is_slow_all_the_time_is_one_alert_however_many_steps_come_at_once(rows: int) -> None:
    """80 steps are what an agent sends of steps of 40 ms: more than the newest step times that are kept."""
    series = {"step_time_s": [0.04] * 600, "phase/data_s": [0.025] * 600, "phase/forward_s": [0.001] * 600}
    changes, evaluator = judge_series(series, rows=rows, step_s=0.04)
    assert [change.kind for change in changes] == ["fire"]
    machine = evaluator.machines["data_bound"]
    assert machine.hits == machine.judged - 24, "only before the alert was there too little to judge"


def test_one_slow_rank_is_not_the_loader_of_all() -> None:
    evaluator = make_evaluator()
    evaluator.window.world_size = 4
    changes = []
    for begin in range(1, 101, 10):
        for rank in range(4):
            wait = 0.05 if rank == 0 else 0.0
            columns = {"step_time_s": [0.06] * 10, "phase/data_s": [wait] * 10}
            changes += evaluator.take(frame(columns, range(begin, begin + 10), rank=rank, ident=begin * 4 + rank))
    assert changes == []


def test_a_healed_loader_is_resolved_and_does_not_flap_at_the_threshold() -> None:
    shares = [0.3] * 60 + [0.101 if step % 2 else 0.099 for step in range(200)] + [0.0] * 700
    changes, _ = judge_series({"step_time_s": [0.1] * len(shares), "phase/data_s": [0.1 * share for share in shares]})
    assert [change.kind for change in changes if change.kind != "update"] == ["fire", "resolve"]


@pytest.mark.parametrize(
    ("device_s", "severity", "says"),
    [
        (0.098, None, ""),
        (0.085, "warning", "waiting 15 ms of 100 ms (15 %)"),
        (0.05, "critical", "waiting 30 ms of 100 ms (30 %)"),
    ],
)  # fmt: skip
def test_a_wait_during_which_the_device_still_computes_gains_only_what_the_device_leaves(
    device_s: float, severity: str | None, says: str
) -> None:
    """The host runs ahead: it waits 30 ms for its batch while the device works on what it was given before."""
    phases = {"forward": 0.33, "backward": 0.61, "optimizer": 0.06}
    columns = {f"phase/{phase}_s": [share * device_s] * 60 for phase, share in phases.items()}
    changes, _ = judge_series({"step_time_s": [0.1] * 60, "phase/data_s": [0.03] * 60, **columns})
    assert [change.finding.severity for change in fired(changes)] == ([severity] if severity else [])
    for change in fired(changes):
        assert says in change.finding.message
        assert change.finding.evidence["hidden_wait_s"] == pytest.approx(max(0.0, 0.03 - (0.1 - device_s)))


@pytest.mark.parametrize(("pct", "rules"), [(97.0, []), (60.0, ["data_bound"])])
def test_gpus_that_are_busy_all_the_time_wait_for_no_loader(pct: float, rules: list[str]) -> None:
    series = {"step_time_s": [0.1] * 100, "phase/data_s": [0.03] * 100, "gpu/utilization_pct": [pct] * 100}
    changes, _ = judge_series(series)
    assert [change.finding.rule for change in fired(changes)] == rules


def test_a_loop_without_a_loader_says_nothing_about_it() -> None:
    changes, evaluator = judge_series({"step_time_s": [0.1] * 100, "loss": [1.0 - 0.001 * step for step in range(100)]})
    assert changes == []
    assert evaluator.verdict().rule == "healthy"


def _train_with_gpu(pct: float, seconds: int, *, pause: range = range(0), known: bool = True) -> tuple[list, Evaluator]:
    """One step a second, utilization sampled once a second; no steps in `pause`."""
    evaluator = make_evaluator()
    changes = []
    for second in range(1, seconds + 1):
        columns = {"step_time_s": [1.0], "phase/data_s": [0.0], "phase/other_s": [0.7], "phase/forward_s": [0.3]}
        if second not in pause:
            changes += evaluator.take(frame(columns, [second], ident=2 * second, step_s=1.0))
        if known:
            changes += evaluator.take(frame({"gpu/utilization_pct": [pct]}, [second], ident=2 * second + 1, step_s=1.0))
    return changes, evaluator


@pytest.mark.parametrize(("pct", "severity"), [(5.0, "warning"), (45.0, "info"), (95.0, None)])
def test_a_gpu_that_idles_for_ten_minutes_is_found_with_its_cause(pct: float, severity: str | None) -> None:
    changes, _ = _train_with_gpu(pct, 630)
    found = fired(changes, "low_gpu_utilization")
    assert [change.finding.severity for change in found] == ([severity] if severity else [])
    if found:
        assert "Python code outside the model" in found[0].finding.evidence["cause"]
        for window in (
            "% of the newest 64 steps)",
            f"over {found[0].finding.evidence['over_s']:.0f} s in which steps were made",
        ):
            assert window in found[0].finding.message
        assert found[0].finding.evidence["over_s"] >= 300


def _with_pauses(every: int, seconds: float) -> dict[str, float]:
    """What is named when every so many steps a checkpoint takes so long, of steps that else are half the loop's own
    code."""
    evaluator = make_evaluator()
    changes = []
    for second in range(1, 641):
        spent = {"phase/forward_s": 0.5, "phase/other_s": 0.5}
        if second % every == 0:
            spent["phase/checkpoint_s"] = seconds
        columns = {name: [value] for name, value in spent.items()}
        columns |= {"step_time_s": [sum(spent.values())], "gpu/utilization_pct": [20.0]}
        changes += evaluator.take(frame(columns, [second], ident=second, step_s=1.0))
    [alert] = fired(changes, "low_gpu_utilization")
    assert alert.finding.evidence["cause"] in alert.finding.message
    return alert.finding.evidence["phase_shares_pct"]


def test_a_checkpoint_now_and_then_is_weighed_by_all_steps_and_not_by_those_that_had_one() -> None:
    shares = _with_pauses(every=32, seconds=6.0)
    assert shares == pytest.approx({"forward": 42.1, "other": 42.1, "checkpoint": 15.8}, abs=0.1)
    often = _with_pauses(every=5, seconds=10.0)
    assert max(often, key=often.__getitem__) == "checkpoint"
    assert often["checkpoint"] == pytest.approx(67, abs=4)


def test_a_gpu_that_idles_while_the_model_acts_in_its_environment_is_said_to() -> None:
    evaluator = make_evaluator()
    changes = []
    for second in range(1, 641):
        columns = {
            "step_time_s": [1.0],
            "phase/rollout_s": [0.8],
            "phase/forward_s": [0.2],
            "gpu/utilization_pct": [20.0],
        }
        changes += evaluator.take(frame(columns, [second], ident=second, step_s=1.0))
    [alert] = fired(changes, "low_gpu_utilization")
    cause = "making rollouts (acting in an environment, generating) takes the time (80 % of the newest 64 steps)"
    assert alert.finding.evidence["cause"] == cause


def test_the_phases_of_a_slow_loader_s_steps_are_means_over_those_that_its_share_counts() -> None:
    evaluator = make_evaluator()
    changes = []
    for step in range(1, 61):
        columns = {"step_time_s": [0.1], "phase/data_s": [0.05]} | ({"phase/eval_s": [2.0]} if step == 30 else {})
        changes += evaluator.take(frame(columns, [step], ident=step))
    [alert] = fired(changes, "data_bound")
    assert alert.finding.evidence["phases_s"] == pytest.approx({"data": 0.05, "eval": 2.0 / 20})


def test_less_than_ten_minutes_of_stepping_are_too_little_for_an_alert() -> None:
    assert fired(_train_with_gpu(5.0, 580)[0]) == []
    assert fired(_train_with_gpu(5.0, 640, pause=range(100, 250))[0]) == []


def test_without_a_gpu_the_rule_abstains() -> None:
    assert fired(_train_with_gpu(0.0, 700, known=False)[0]) == []


def test_thresholds_are_values() -> None:
    assert LowGpuUtilization(for_s=10).for_s == 10
    assert [spell_s(value) for value in (0.05, 1.25, 0.00018, 250.0)] == ["50 ms", "1.25 s", "180 µs", "250 s"]


@pytest.mark.parametrize(
    ("cores", "workers", "said"),
    [
        (2.0, 0.0, "Set num_workers=1 (0 now, on 2 cores)"),
        (16.0, 4.0, "Set num_workers=15 (4 now, on 16 cores)"),
        (2.0, 1.0, "More workers would only share the same cores"),
    ],
)
def test_the_fix_of_a_data_wait_never_asks_for_more_workers_than_there_are_cores(
    cores: float, workers: float, said: str
) -> None:
    series = {"step_time_s": [0.06] * 60, "phase/data_s": [0.05] * 60}
    changes, _ = judge_series({"host/cores": [cores] * 60, "process/workers": [workers] * 60, **series}, rows=10)
    [alert] = fired(changes, "data_bound")
    assert alert.finding.fix.startswith(said)
    assert alert.finding.fix.count("num_workers=") == said.count("num_workers="), "one number, of this machine"
