"""Step time, throughput and shares over one window: through the API, and by hand-made numbers."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from api_builders import api, frame, send
from builders import until
from judging import figures_of, samples
from sqlalchemy import event

from perfagent.wire import Event, Series
from perfagent_server.runs.figures import WHOLE_POINTS, Figures, quantile, timing_of

NOTHING: dict[str, Any] = {
    "from_step": 0, "to_step": 0, "series": {}, "shares": {}, "window": None, "rates": {}, "phase_shares": {},
}  # fmt: skip
FINISHED = Event(kind="state", step=300, time=1_700_000_300.0, data={"state": "finished"})


def test_percentiles_are_those_of_the_newest_steps(tmp_path: Path) -> None:
    draw = random.Random(1)
    old, new = [9.0] * 300, [draw.expovariate(10.0) for _ in range(1000)]
    with api(tmp_path) as client:
        send(client, frame({"step_time_s": old + new, "phase/data_s": [0.0] * 300 + [value / 4 for value in new]}))
        told = client.get("/api/v1/runs/r1/timing", params={"steps": 1000}).json()
        everything = client.get("/api/v1/runs/r1/timing", params={"steps": 5000}).json()
    assert (told["from_step"], told["to_step"]) == (301, 1300)
    cuts = statistics.quantiles(new, n=100, method="inclusive")
    found = told["series"]["step_time_s"]
    assert [found["p50"], found["p90"], found["p99"]] == pytest.approx([cuts[49], cuts[89], cuts[98]])
    assert found["count"] == 1000
    assert found["mean"] == pytest.approx(statistics.mean(new))
    assert told["shares"] == pytest.approx({"data": 0.25})
    assert everything["series"]["step_time_s"]["p99"] == 9.0
    assert everything["series"]["step_time_s"]["count"] == 1300


def test_shares_are_of_all_the_time_and_absent_where_nothing_was_measured(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        phases = {"phase/forward_s": [0.1] * 4, "phase/backward_s": [0.2] * 4, "phase/optimizer_s": [0.1] * 4}
        send(client, frame({"step_time_s": [0.8] * 4, **phases, "phase/comm_s": [0.2] * 4}))
        send(client, frame({"phase/eval_s": [0.2]}, seq=2, first_step=3))  # in one step of the four
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["shares"] == pytest.approx({"compute": 0.5, "communication": 0.25, "evaluation": 0.0625})
    each = {"forward": 0.125, "backward": 0.25, "optimizer": 0.125, "comm": 0.25, "eval": 0.0625}
    assert told["phase_shares"] == pytest.approx(each)
    assert told["series"]["phase/eval_s"]["count"] == 1


def test_a_rollout_has_a_share_of_its_own(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"step_time_s": [0.2] * 4, "phase/forward_s": [0.1] * 4}))
        send(client, frame({"step_time_s": [3.2], "phase/rollout_s": [3.0]}, seq=2, first_step=5))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["shares"] == pytest.approx({"compute": 0.1, "rollout": 0.75})


def test_a_step_that_was_not_timed_as_a_whole_counts_nowhere(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"phase/backward_s": [9.0] + [0.06] * 39, "phase/optimizer_s": [1.0] + [0.04] * 39}))
        send(client, frame({"step_time_s": [0.1] * 39}, seq=2, first_step=2))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert (told["from_step"], told["to_step"]) == (2, 40)
    assert told["shares"] == pytest.approx({"compute": 1.0})
    assert {series["count"] for series in told["series"].values()} == {39}


def test_an_evaluation_after_the_last_step_adds_to_the_whole(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"step_time_s": [0.1] * 40, "phase/forward_s": [0.1] * 40}))
        send(client, frame({"phase/eval_s": [12.0]}, seq=2, first_step=40))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["shares"] == pytest.approx({"compute": 0.25, "evaluation": 0.75})


def test_ranks_are_put_together_as_the_catalogue_says(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for rank, step_time in ((0, 1.0), (1, 3.0)):
            send(client, frame({"step_time_s": [step_time] * 5, "phase/comm_s": [step_time / 2] * 5}, rank=rank))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["series"]["step_time_s"]["p50"] == 3.0, "the slowest rank is the step"
    assert told["series"]["phase/comm_s"]["p50"] == 1.0, "a phase is the mean"


@pytest.mark.sqlite
def test_all_phases_are_read_from_the_tail_in_one_pass(tmp_path: Path) -> None:
    """Fourteen series one by one unpacked each row of the tail fifteen times: 11 s with 512 ranks."""
    with api(tmp_path) as client:
        for rank in range(3):
            columns = {"step_time_s": [1.0] * 5, "phase/comm_s": [0.5] * 5, "phase/forward_s": [0.25] * 5}
            send(client, frame(columns, rank=rank))
        services = client.app.state.services  # type: ignore[attr-defined]
        until(lambda: services.engine.counters["frames"] == 3)  # the rules read the tail, too
        statements: list[str] = []
        engine = services.database.engine
        event.listen(engine, "before_cursor_execute", lambda *about: statements.append(about[2]))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["series"].keys() == {"step_time_s", "phase/comm_s", "phase/forward_s"}
    passes = [sql for sql in statements if "WHERE tail.run = ? AND tail.samples > ?" in sql]
    assert len(passes) == 1


def test_a_run_without_steps_has_no_timing(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        told = client.get("/api/v1/runs/r1/timing").json()
        assert told == NOTHING
        assert client.get("/api/v1/runs/nobody/timing").status_code == 404
        assert client.get("/api/v1/runs/r1/timing", params={"steps": 0}).status_code == 422


def test_quantiles_of_few_values() -> None:
    assert quantile([5.0], 0.99) == 5.0
    assert quantile([1.0, 2.0], 0.5) == 1.5
    assert quantile([1.0, 2.0, 4.0], 1.0) == 4.0


def test_the_window_of_a_run_that_goes_on_is_its_newest_hundred_steps_and_then_the_whole_run(tmp_path: Path) -> None:
    slow, fast = [1.0] * 200, [0.1] * 100
    rates = [1 / time for time in slow + fast]
    with api(tmp_path) as client:
        send(client, frame({"step_time_s": slow + fast, "tokens_per_s": rates, "samples_per_s": rates}))
        live = client.get("/api/v1/runs/r1/timing").json()
        send(client, frame({}, seq=2, events=[FINISHED]))
        ended = client.get("/api/v1/runs/r1/timing").json()
    assert live["window"] == {"from_step": 201, "to_step": 300, "steps": 100, "whole_run": False, "bucket_steps": 1}
    assert [live["series"]["step_time_s"]["p50"], live["rates"]["tokens_per_s"]["p50"]] == pytest.approx([0.1, 10.0])
    assert ended["window"] == {"from_step": 1, "to_step": 300, "steps": 300, "whole_run": True, "bucket_steps": 1}
    assert [ended["series"]["step_time_s"]["p50"], ended["rates"]["tokens_per_s"]["p50"]] == pytest.approx([1.0, 1.0])
    assert ended["rates"]["samples_per_s"] == ended["rates"]["tokens_per_s"]


def test_a_script_that_times_no_step_has_a_throughput(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0] * 5, "samples_per_s": [10.0, 20.0, 30.0, 40.0, 50.0]}))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["rates"]["samples_per_s"]["p50"] == 30.0
    assert told["window"]["steps"] == 5
    assert told["series"] == told["shares"] == {}


def test_a_whole_run_of_more_steps_than_are_read_one_by_one_keeps_its_mean_and_its_shares(tmp_path: Path) -> None:
    draw = random.Random(2)
    steps = WHOLE_POINTS + 1000
    times = [draw.uniform(0.1, 0.2) for _ in range(steps)]
    pauses = dict.fromkeys(range(1000, steps, 1000), 30.0)
    with api(tmp_path) as client:
        columns = {"step_time_s": times, "phase/forward_s": [time / 2 for time in times]}
        for seq, first in enumerate(range(0, steps, 1000), start=1):
            send(client, frame({k: v[first : first + 1000] for k, v in columns.items()}, seq=seq, first_step=first + 1))
        for seq, (step, time) in enumerate(pauses.items(), start=100):
            send(client, frame({"phase/eval_s": [time]}, seq=seq, first_step=step))
        send(client, frame({}, seq=500, events=[FINISHED]))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["window"] == {"from_step": 1, "to_step": steps, "steps": steps, "whole_run": True, "bucket_steps": 2}
    found = told["series"]["step_time_s"]
    assert (found["mean"], found["count"]) == (pytest.approx(statistics.mean(times)), steps)
    assert found["p50"] == pytest.approx(statistics.median(times), rel=0.02)
    assert told["series"]["phase/eval_s"]["count"] == len(pauses)
    total = sum(times) + sum(max(0.0, 30.0 - (times[step - 1] + times[step]) / 2) for step in pauses)
    assert told["shares"]["evaluation"] == pytest.approx(30.0 * len(pauses) / total, rel=0.01)


def test_what_retention_left_of_a_run_counts_for_as_many_steps_as_it_stands_for() -> None:
    """Cells of sixteen steps, of two ranks; an evaluation in one of the steps."""
    cells = Series(
        name="step_time_s", rank="all", unit="s", exact=False, step=[0, 16, 32], min=[0.0] * 3, max=[9.0] * 3,
        mean=[0.1, 0.3, 0.5], count=[32, 32, 2], nonfinite=[0, 0, 0], ranks=2,
    )  # fmt: skip
    evaluation = Series(
        name="phase/eval_s", rank="all", unit="s", exact=False, step=[16], min=[1.0], max=[1.0], mean=[1.0], count=[2],
        nonfinite=[0], ranks=2,
    )  # fmt: skip
    told = timing_of({"step_time_s": cells, "phase/eval_s": evaluation}, whole_run=True)
    assert told.window is not None
    assert (told.window.steps, told.window.bucket_steps) == (33, 16)
    assert told.series["step_time_s"].count == 33
    assert told.series["step_time_s"].mean == pytest.approx((16 * 0.1 + 16 * 0.3 + 0.5) / 33)
    assert told.series["step_time_s"].p50 == 0.3
    assert told.shares["evaluation"] == pytest.approx(1.0 / (16 * 0.1 + 16 * 0.3 + 0.5))


def test_a_value_that_is_no_number_counts_nowhere() -> None:
    told = figures_of({"step_time_s": [0.1, float("nan"), 0.3], "tokens_per_s": [10.0, 20.0, float("inf")]})
    assert (told.series["step_time_s"].count, told.series["step_time_s"].p50) == (2, 0.2)
    assert (told.rates["tokens_per_s"].count, told.rates["tokens_per_s"].p50) == (1, 10.0)
    assert timing_of({"step_time_s": samples("step_time_s", [float("nan")])}, whole_run=True).window is None


def test_the_words_of_a_window_are_those_of_a_sentence() -> None:
    columns = {"step_time_s": [0.1] * 1200}
    assert str(figures_of(columns).window) == "the newest 1,200 steps"
    assert str(figures_of({"step_time_s": [0.1]}).window) == "the newest step"
    assert str(figures_of(columns, whole_run=True).window) == "the whole run"


def test_figures_are_computed_once_a_second_while_a_run_goes_on_and_not_again_when_it_rests(tmp_path: Path) -> None:
    now, asked = 0.0, []
    with api(tmp_path) as client:
        services = client.app.state.services  # type: ignore[attr-defined]
        newest = services.store.newest
        services.store.newest = lambda run, *rest, **more: asked.append(run) or newest(run, *rest, **more)
        figures = Figures(services.database, services.store, clock=lambda: now)

        def median() -> float:
            return figures.of("r1").series["step_time_s"].p50

        send(client, frame({"step_time_s": [0.1] * 100}))
        assert [median(), median()] == [0.1, 0.1]
        send(client, frame({"step_time_s": [0.2] * 100}, seq=2, first_step=101))
        now = 0.9
        assert (median(), len(asked)) == (0.1, 1)
        now = 1.1
        assert (median(), len(asked)) == (0.2, 2)
        now = 900.0
        assert (median(), len(asked)) == (0.2, 2)
        send(client, frame({}, seq=3, events=[FINISHED]))
        assert (figures.of("r1").window.whole_run, len(asked)) == (True, 3), "an end is not awaited"
        services.store.newest = newest


def test_many_runs_are_asked_for_at_once(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for run in ("a", "b"):
            send(client, frame({"step_time_s": [0.1] * 5}, run=run))
        send(client, frame({"loss": [1.0]}, run="c"))
        told = client.get("/api/v1/timing", params=[("run", run) for run in "abcx"]).json()["timing"]
        assert told == {**{run: client.get(f"/api/v1/runs/{run}/timing").json() for run in "ab"}, "c": NOTHING}
        assert client.get("/api/v1/timing").status_code == 422
        assert client.get("/api/v1/timing", params=[("run", "a")] * 201).status_code == 422
