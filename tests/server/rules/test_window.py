"""The window: ranks put together, bounded memory, and nothing lost in a snapshot."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import pytest
from judging import START, fired, frame, make_evaluator, restored, state

from perfagent.wire import Group
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.step_series import PATIENCE_S
from perfagent_server.rules.time_series import TimeSeries
from perfagent_server.store.codec.tail import TailGroup
from perfagent_server.store.stored import FromTail


def test_a_nan_does_not_wait_for_other_ranks() -> None:
    changes = begun(512).take(frame({"loss": [math.nan]}, [1], rank=7, ident=2))
    assert [change.finding.ranks for change in fired(changes, "nonfinite_loss")] == [[7]]


def begun(ranks: int) -> Evaluator:
    evaluator = make_evaluator()
    evaluator.take(frame({}, [], events=[state("starting", world_size=ranks)]))
    return evaluator


def send(evaluator: Evaluator, rank: int, series: dict[str, list[float]], steps: Sequence[int]) -> None:
    evaluator.take(frame(series, steps, rank=rank, ident=evaluator.upto + 1))


def known(evaluator: Evaluator, name: str) -> tuple[list[int], list[float]] | None:
    track = evaluator.window.series(name)
    return None if track is None else (track.last_steps(5), track.last(5))


def test_a_step_waits_for_every_rank_but_only_so_long() -> None:
    evaluator = begun(2)
    send(evaluator, 0, {"loss": [1.0, 2.0, 9.0]}, [1, 2, 3])
    assert known(evaluator, "loss") is None
    send(evaluator, 1, {"loss": [3.0, 4.0]}, [1, 2])
    assert known(evaluator, "loss") == ([1, 2], [2.0, 3.0])
    assert evaluator.window.waits_until() is not None
    evaluator.tick(evaluator.window.now + PATIENCE_S - 0.1)
    assert known(evaluator, "loss") == ([1, 2], [2.0, 3.0])
    evaluator.tick(evaluator.window.now + 0.2)
    assert known(evaluator, "loss") == ([1, 2, 3], [2.0, 3.0, 9.0])
    assert evaluator.window.waits_until() is None
    for step in range(4, 200):  # only one rank logs
        send(evaluator, 0, {"loss": [float(step)]}, [step])
    assert evaluator.window.value("loss") == 199.0


def test_the_norm_that_ranks_sent_parts_of_is_whole_or_none() -> None:
    evaluator, name = begun(2), "grad/local_square_sum"
    send(evaluator, 0, {name: [9.0, 1.0]}, [4, 8])
    assert known(evaluator, "grad/norm") is None
    send(evaluator, 1, {name: [16.0, 3.0]}, [4, 8])
    evaluator = restored(evaluator)
    assert known(evaluator, "grad/norm") == ([4, 8], [5.0, 2.0])
    send(evaluator, 0, {name: [1.0, 8.0]}, [10, 12])
    send(evaluator, 1, {name: [8.0]}, [12])
    evaluator.tick(evaluator.window.now + PATIENCE_S + 0.1)
    assert known(evaluator, "grad/norm") == ([4, 8, 12], [5.0, 2.0, 4.0])
    alone = make_evaluator()
    send(alone, 0, {name: [9.0, 25.0]}, [1, 2])
    assert known(alone, "grad/norm") == ([1, 2], [3.0, 5.0])


def test_memory_is_bounded_however_long_the_run_and_late_a_rank() -> None:
    evaluator = begun(2)
    for begin in range(1, 20_001, 500):
        columns = {"loss": [1.0] * 500, "step_time_s": [0.1] * 500, "my/own_name": [1.0] * 500}
        evaluator.take(frame(columns, range(begin, begin + 500), ident=begin + 1, received=1.0))
    tracks = evaluator.window.by_step
    assert "my/own_name" not in tracks
    assert all(len(one.values) <= 2 * one.size + 1000 and len(one.pending) <= 1100 for one in tracks.values())
    assert len(evaluator.snapshot()) < 64 * 1024


def sent_together(*groups: tuple[list[int], dict[str, list[float]]]) -> Evaluator:
    """One frame of these groups; float32, as agents send."""
    evaluator, held = make_evaluator(), []
    for steps, columns in groups:
        at = [START + step for step in steps]
        values = {name: array("f", column) for name, column in columns.items()}
        held.append(TailGroup.of_group(Group(steps, at, at, values)))  # type: ignore[arg-type]
    evaluator.take(FromTail(1, "r", 1, 0, "s", 1, START + 40, held, []))
    return evaluator


def test_groups_of_a_frame_are_judged_in_the_order_of_steps() -> None:
    """Steps whose gradients were looked at come in a group of their own, behind the others of the frame."""
    tracks = sent_together(
        ([1, 3, 5], {"loss": [0.1, 0.3, 0.5], "step_time_s": [0.2] * 3}),
        ([2, 4, 5], {"loss": [0.2, 0.4, 0.5], "step_time_s": [0.2] * 3, "grad/norm": [1.0] * 3}),
    ).window.by_step
    assert tracks["loss"].steps.tolist() == tracks["step_time_s"].steps.tolist() == [1, 2, 3, 4, 5]
    assert tracks["loss"].values.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (tracks["grad/norm"].steps.tolist(), tracks["loss"].total) == ([2, 4, 5], 5)


def test_a_reading_before_the_first_step_times_ends_no_step() -> None:
    """The sampler's rows carry the step in progress. A first frame has a second of both."""
    both = ([20], {"process/rss_bytes": [1e9]}), ([18, 19], {"step_time_s": [0.1, 0.1], "loss": [1.0, 1.0]})
    assert sent_together(*both).window.step == 19


def test_readings_that_are_kept_apart_can_be_read_together() -> None:
    series = TimeSeries(8, apart=True)
    assert (series.newest(5), series.tail(4, 5), series.mean(0.0, 1.0, 5), series.newest()) == (None, [], None, None)
    for rank, values in ((0, [1.0, 2.0]), (3, [5.0, 6.0])):
        series.take(rank, [10.0, 11.0], values, [True, False])
    assert (series.newest(3), series.newest(), series.mean(10.0, 11.0), series.ranks) == (6.0, 4.0, 3.5, [0, 3])
    together = series.seconds()
    assert (together.second.tolist(), together.total.tolist()) == ([10.0, 11.0], [6.0, 8.0])
    assert (together.count.tolist(), together.stepping.tolist()) == ([2.0, 2.0], [True, False])
