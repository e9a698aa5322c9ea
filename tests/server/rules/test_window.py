"""The window: ranks put together, bounded memory, and nothing lost in a snapshot."""

from __future__ import annotations

import math
import random
from array import array

import msgspec
import pytest
from judging import START, fired, frame, make_evaluator, restored, state

from perfagent.wire import Group
from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.step_series import PATIENCE_S
from perfagent_server.rules.time_series import TimeSeries
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail


def test_a_step_is_judged_when_every_rank_has_reported_it() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    evaluator.take(frame({"loss": [1.0, 2.0]}, [1, 2], rank=0, ident=2))
    assert evaluator.window.series("loss") is None
    evaluator.take(frame({"loss": [3.0, 4.0]}, [1, 2], rank=1, ident=3))
    track = evaluator.window.series("loss")
    assert track is not None
    assert track.last(5) == [2.0, 3.0]


def test_columns_of_float32_are_read_as_those_of_float64() -> None:
    evaluator = make_evaluator()
    times = [START] * 3
    group = Group([1, 2, 3], times, times, {"loss": array("f", [0.5, 0.25, 0.125]), "lr": [1.0, 2.0, 3.0]})  # type: ignore[dict-item]
    evaluator.take(FromTail(1, "r", 1, 0, "s", 1, START, [TailGroup.of_group(group)], []))
    assert evaluator.window.by_step["loss"].values.tolist() == [0.5, 0.25, 0.125]


def test_a_silent_rank_keeps_a_step_waiting_only_so_long() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    evaluator.take(frame({"loss": [1.0]}, [1], rank=0, ident=2))
    assert evaluator.window.waits_until() is not None
    evaluator.tick(evaluator.window.now + PATIENCE_S - 0.1)
    assert evaluator.window.series("loss") is None
    evaluator.tick(evaluator.window.now + 0.2)
    track = evaluator.window.series("loss")
    assert track is not None
    assert track.last(1) == [1.0]
    assert evaluator.window.waits_until() is None


def test_a_series_that_only_one_rank_logs_does_not_wait_for_the_others_for_ever() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=8)]))
    for step in range(1, 200):
        evaluator.take(frame({"loss": [float(step)]}, [step], rank=0, ident=1 + step))
    track = evaluator.window.series("loss")
    assert track is not None
    assert track.value == 199.0


def test_a_nan_does_not_wait_for_other_ranks() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=512)]))
    changes = evaluator.take(frame({"loss": [math.nan]}, [1], rank=7, ident=2))
    assert [change.finding.ranks for change in fired(changes, "nonfinite_loss")] == [[7]]
    assert "rank 7" in changes[0].finding.message


def test_memory_is_bounded_however_long_the_run_and_however_late_a_rank() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    for begin in range(1, 20_001, 500):
        columns = {"loss": [1.0] * 500, "step_time_s": [0.1] * 500, "my/own_name": [1.0] * 500}
        evaluator.take(frame(columns, range(begin, begin + 500), ident=begin + 1, received=1.0))
    window = evaluator.window
    assert "my/own_name" not in window.by_step
    assert all(
        len(track.values) <= 2 * track.size + 1000 and len(track.pending) <= 1100 for track in window.by_step.values()
    )
    assert len(evaluator.snapshot()) < 64 * 1024


def _story(seed: int) -> list[FromTail]:
    """Two ranks, noise, a NaN, a spike, a slow loader, overflow and an end, in frames of any size."""
    draw = random.Random(seed)
    frames: list[FromTail] = [frame({}, [], events=[state("starting", world_size=2)])]
    step, ident = 1, 2
    while step < 900:
        rows = draw.randint(1, 40)
        steps = range(step, step + rows)
        for rank in (0, 1):
            loss = [3.0 + draw.gauss(0, 0.02) + (1.0 if 400 <= at < 430 else 0.0) for at in steps]
            if 600 in steps and rank == 1:
                loss[600 - step] = math.nan
            columns = {
                "loss": loss, "step_time_s": [0.1] * rows, "phase/data_s": [0.05 if at > 700 else 0.0 for at in steps],
                "lr": [1e-3] * rows, "grad/norm": [math.inf if at % 211 == 0 else 1.0 for at in steps],
                "amp/scale": [2.0 ** (20 - at // 211) for at in steps], "gpu/utilization_pct": [10.0] * rows,
            }  # fmt: skip
            frames.append(frame(columns, steps, rank=rank, ident=ident, step_s=1.0))
            ident += 1
        step += rows
    for rank in (0, 1):
        frames.append(
            frame(
                {},
                [],
                rank=rank,
                ident=ident + rank,
                received=frames[-1].received,
                events=[state("finished", step=step)],
            )
        )
    return frames


def _told(changes: list[Change]) -> list[tuple[str, str, str, int, str]]:
    return [(change.kind, change.alert, change.finding.rule, change.step, change.finding.message) for change in changes]


@pytest.mark.parametrize("seed", range(4))
def test_judging_goes_on_from_a_snapshot_as_if_nothing_had_happened(seed: int) -> None:
    frames = _story(seed)
    whole = make_evaluator()
    expected = [change for one in frames for change in whole.take(one)]
    rules = {change.finding.rule for change in expected}
    assert {"nonfinite_loss", "loss_spike", "data_bound", "low_gpu_utilization"} <= rules
    draw = random.Random(seed)
    broken, found = make_evaluator(), []
    for one in frames:
        found += broken.take(one)
        if draw.random() < 0.3:
            broken = restored(broken)
    assert _told(found) == _told(expected)


def test_a_snapshot_holds_plain_values_only() -> None:
    evaluator = make_evaluator()
    for one in _story(1)[:20]:
        evaluator.take(one)
    state_ = msgspec.msgpack.decode(evaluator.snapshot())
    assert set(state_) == {"upto", "window", "machines", "older"}


def test_rules_read_the_norm_that_ranks_sent_parts_of() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    evaluator.take(frame({"grad/local_square_sum": [9.0, 1.0]}, [4, 8], rank=0, ident=2))
    assert evaluator.window.series("grad/norm") is None
    evaluator.take(frame({"grad/local_square_sum": [16.0, 3.0]}, [4, 8], rank=1, ident=3))
    evaluator = restored(evaluator)
    track = evaluator.window.series("grad/norm")
    assert track is not None
    assert track.last(5) == [5.0, 2.0]
    evaluator.take(frame({"grad/local_square_sum": [8.0]}, [12], rank=0, ident=4))
    evaluator.take(frame({"grad/local_square_sum": [8.0]}, [12], rank=1, ident=5))
    assert evaluator.window.value("grad/norm") == 4.0


def test_part_of_a_norm_is_none_for_the_rules_either() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=2)]))
    evaluator.take(frame({"grad/local_square_sum": [1.0, 9.0]}, [2, 4], rank=0, ident=2))
    evaluator.take(frame({"grad/local_square_sum": [16.0]}, [4], rank=1, ident=3))
    evaluator.tick(evaluator.window.now + PATIENCE_S + 0.1)
    track = evaluator.window.series("grad/norm")
    assert track is not None
    assert (track.last_steps(5), track.last(5)) == ([4], [5.0])


def test_one_rank_that_holds_all_the_parts_needs_no_other() -> None:
    evaluator = make_evaluator()
    evaluator.take(frame({"grad/local_square_sum": [9.0, 25.0]}, [1, 2]))
    track = evaluator.window.series("grad/norm")
    assert track is not None
    assert track.last(5) == [3.0, 5.0]


def test_steps_that_have_more_to_tell_than_others_are_judged_with_them_in_order() -> None:
    """Steps whose gradients were looked at come in a group of their own, behind the others of the frame."""
    evaluator = make_evaluator()
    times = [1_700_000_000.0 + step for step in range(1, 41)]
    for begin in range(1, 41, 8):
        usual = [step for step in range(begin, begin + 8) if step % 2]
        rare = [step for step in range(begin, begin + 8) if not step % 2]
        groups = []
        for steps, more in ((usual, {}), (rare, {"grad/norm": [1.0] * len(rare)})):
            at = [times[step - 1] for step in steps]
            values = {"loss": [1.0 / step for step in steps], "step_time_s": [0.2] * len(steps), **more}
            groups.append(TailGroup.of_group(Group(steps, at, at, values)))  # type: ignore[arg-type]
        evaluator.take(FromTail(begin, "r", 1, 0, "s", begin, times[begin + 6], groups, []))
    tracks = evaluator.window.by_step
    assert tracks["loss"].steps.tolist() == tracks["step_time_s"].steps.tolist() == [*range(1, 41)]
    assert tracks["loss"].values.tolist() == [1.0 / step for step in range(1, 41)]
    assert tracks["grad/norm"].steps.tolist() == [*range(2, 41, 2)]
    assert tracks["loss"].total == 40


def test_a_step_that_is_in_two_groups_of_a_frame_counts_once() -> None:
    evaluator = make_evaluator()
    groups = [
        Group([3, 5], [1.0, 2.0], [1.0, 2.0], {"loss": [0.3, 0.5]}),  # type: ignore[arg-type,dict-item]
        Group([4, 5], [1.5, 2.0], [1.5, 2.0], {"loss": [0.4, 0.5], "lr": [0.1, 0.1]}),  # type: ignore[arg-type,dict-item]
    ]
    groups = [TailGroup.of_group(group) for group in groups]
    evaluator.take(FromTail(1, "r", 1, 0, "s", 1, 2.0, groups, []))
    assert evaluator.window.by_step["loss"].steps.tolist() == [3, 4, 5]
    assert evaluator.window.by_step["loss"].total == 3


def test_a_reading_that_comes_before_the_first_step_times_of_its_frame_ends_no_step() -> None:
    """The sampler's rows carry the step in progress. A first frame has a second of both."""
    evaluator = make_evaluator()
    at = [START]
    groups = [
        Group([20], at, at, {"process/rss_bytes": [1e9]}),
        Group([18, 19], at * 2, at * 2, {"step_time_s": [0.1, 0.1], "loss": [1.0, 1.0]}),
    ]
    held = [TailGroup.of_group(group) for group in groups]
    evaluator.take(FromTail(1, "r", 1, 0, "s", 1, START, held, []))
    assert evaluator.window.step == 19


@pytest.mark.parametrize("rows", [50, 400, 5000])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_bad_step_is_named_however_many_follow_it_in_its_frame(rows: int, ranks: int) -> None:
    evaluator, changes = make_evaluator(), []
    length = max(400, rows)
    losses = [2.0] * 209 + [math.nan] * (length - 209)
    for begin in range(0, length, rows):
        steps = range(1 + begin, 1 + begin + rows)
        for rank in range(ranks):
            columns = {"loss": losses[begin : begin + rows], "grad/norm": losses[begin : begin + rows]}
            changes += evaluator.take(frame(columns, steps, rank=rank, ident=evaluator.upto + 1))
            evaluator = restored(evaluator)
    assert [(change.finding.rule, change.finding.since_step) for change in fired(changes, "nonfinite_loss")] == [
        ("nonfinite_loss", 210)
    ]
    assert changes[-1].finding.ranks == list(range(ranks))
    assert len(evaluator.window.nonfinite["loss"].steps) <= 512


def test_a_row_of_bad_steps_that_is_no_fault_does_not_hide_the_one_that_is() -> None:
    """Two steps that the GradScaler skipped, healthy ones, and then NaN to the end: all in one frame."""
    losses = [2.0] * 10 + [math.nan] * 2 + [2.0] * 100 + [math.nan] * 300
    skipped = [0.0] * 10 + [1.0, 2.0] + [2.0] * 400
    changes = make_evaluator().take(frame({"loss": losses, "amp/skipped": skipped}, range(1, 413)))
    assert [change.finding.since_step for change in fired(changes, "nonfinite_loss")] == [113]


def test_since_is_the_time_of_the_step_also_where_losses_are_logged_now_and_then() -> None:
    steps = range(10, 510, 10)
    changes = make_evaluator().take(frame({"loss": [2.0] * 25 + [math.nan] * 25}, steps, step_s=1.0))
    assert [change.finding.since for change in fired(changes, "nonfinite_loss")] == [
        "2023-11-14T22:17:40.000Z"
    ]  # step 260


def test_readings_that_are_kept_apart_can_be_read_together() -> None:
    series = TimeSeries(8, apart=True)
    for rank, values in ((0, [1.0, 2.0]), (3, [5.0, 6.0])):
        series.take(rank, [10.0, 11.0], values, [True, False])
    assert series.newest(3) == 6.0
    assert series.newest() == 4.0
    assert series.mean(10.0, 11.0) == 3.5
    together = series.seconds()
    assert (together.second.tolist(), together.total.tolist()) == ([10.0, 11.0], [6.0, 8.0])
    assert (together.count.tolist(), together.stepping.tolist()) == ([2.0, 2.0], [True, False])


def test_asking_for_the_readings_of_a_rank_that_sent_none_makes_no_rank_of_it() -> None:
    series = TimeSeries(8, apart=True)
    assert (series.newest(5), series.tail(4, 5), series.mean(0.0, 1.0, 5), series.newest()) == (None, [], None, None)
    series.take(2, [10.0], [1.0], [True])
    assert (series.newest(5), series.ranks) == (None, [2])
