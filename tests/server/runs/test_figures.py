"""Step time, throughput and shares over one window: through the API, and by hand-made numbers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import api, frame, send, services_of
from builders import until
from fastapi.testclient import TestClient
from frames import state
from judging import figures_of, samples
from statements import statements_of

from perfagent_server.runs.figures import WHOLE_POINTS, quantile, timing_of

NOTHING: dict[str, Any] = {
    "from_step": 0, "to_step": 0, "series": {}, "shares": {}, "window": None, "rates": {}, "phase_shares": {},
}  # fmt: skip
FINISHED = state("finished", time=1_700_000_300.0, step=300)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("figures")) as running:
        yield running


def timing(client: TestClient, run: str, **asked: Any) -> Any:
    return client.get(f"/api/v1/runs/{run}/timing", params=asked).json()


def test_percentiles_are_those_of_the_newest_steps(client: TestClient) -> None:
    draw = random.Random(1)
    old, new = [9.0] * 300, [draw.expovariate(10.0) for _ in range(1000)]
    waits = [0.0] * 300 + [value / 4 for value in new]
    send(client, frame({"step_time_s": old + new, "phase/data_s": waits}, run="newest"))
    told = timing(client, "newest", steps=1000)
    assert (told["from_step"], told["to_step"]) == (301, 1300)
    cuts = statistics.quantiles(new, n=100, method="inclusive")
    found = told["series"]["step_time_s"]
    assert [found["p50"], found["p90"], found["p99"]] == pytest.approx([cuts[49], cuts[89], cuts[98]])
    assert (found["count"], found["mean"]) == (1000, pytest.approx(statistics.mean(new)))
    assert told["shares"] == pytest.approx({"data": 0.25})
    everything = timing(client, "newest", steps=5000)["series"]["step_time_s"]
    assert (everything["p99"], everything["count"]) == (9.0, 1300)


def of(step_time: list[float], **phases: list[float]) -> dict[str, list[float]]:
    return {"step_time_s": step_time, **{f"phase/{name}_s": values for name, values in phases.items()}}


SHARES: list[tuple[list[tuple[int, dict[str, list[float]]]], dict[str, float], dict[str, float]]] = [
    (
        [(1, of([0.8] * 4, forward=[0.1] * 4, backward=[0.2] * 4, optimizer=[0.1] * 4, comm=[0.2] * 4)),
         (3, {"phase/eval_s": [0.2]})],  # in one step of the four
        {"compute": 0.5, "communication": 0.25, "evaluation": 0.0625},
        {"forward": 0.125, "backward": 0.25, "optimizer": 0.125, "comm": 0.25, "eval": 0.0625},
    ),
    (
        [(1, of([0.2] * 4, forward=[0.1] * 4)), (5, of([3.2], rollout=[3.0]))],
        {"compute": 0.1, "rollout": 0.75}, {"forward": 0.1, "rollout": 0.75},
    ),
    (  # a step that was not timed as a whole counts nowhere
        [(1, {"phase/backward_s": [9.0] + [0.06] * 39, "phase/optimizer_s": [1.0] + [0.04] * 39}), (2, of([0.1] * 39))],
        {"compute": 1.0}, {"backward": 0.6, "optimizer": 0.4},
    ),
    (  # an evaluation after the last step adds to the whole
        [(1, of([0.1] * 40, forward=[0.1] * 40)), (40, {"phase/eval_s": [12.0]})],
        {"compute": 0.25, "evaluation": 0.75}, {"forward": 0.25, "eval": 0.75},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("frames", "shares", "phases"), SHARES, ids=["phases", "rollout", "untimed", "evaluation"])
def test_shares_are_of_all_the_time_that_was_measured(client: TestClient, frames, shares, phases) -> None:
    run = "+".join(shares)
    for seq, (first, columns) in enumerate(frames, 1):
        send(client, frame(columns, run=run, seq=seq, first_step=first))
    told = timing(client, run)
    assert told["shares"] == pytest.approx(shares)
    assert told["phase_shares"] == pytest.approx(phases)
    if "eval" in phases:
        assert told["series"]["phase/eval_s"]["count"] == 1
    if shares == {"compute": 1.0}:
        assert (told["from_step"], {series["count"] for series in told["series"].values()}) == (2, {39})


def test_ranks_are_read_in_one_pass_and_put_together(tmp_path: Path) -> None:
    """Fourteen series one by one unpacked each row of the tail fifteen times: 11 s with 512 ranks."""
    with api(tmp_path) as client:
        for rank, step_time in ((0, 1.0), (1, 3.0)):
            send(client, frame(of([step_time] * 5, comm=[step_time / 2] * 5, forward=[0.25] * 5), rank=rank))
        services = services_of(client)
        until(lambda: services.engine.counters["frames"] == 2)  # the rules read the tail, too
        asked = statements_of(services.database.engine, lambda: timing(client, "r1"))
        told = timing(client, "r1")
    assert told["series"]["step_time_s"]["p50"] == 3.0, "the slowest rank is the step"
    assert told["series"]["phase/comm_s"]["p50"] == 1.0, "a phase is the mean"
    assert told["series"].keys() == {"step_time_s", "phase/comm_s", "phase/forward_s"}
    assert len([sql for sql, _ in asked if "tail.frame" in sql]) == 1


def test_a_run_without_steps_has_no_timing_but_a_throughput(client: TestClient) -> None:
    send(client, frame({"loss": [1.0]}, run="bare"))
    assert timing(client, "bare") == NOTHING
    for path, params, status in (
        ("/runs/nobody/timing", {}, 404), ("/runs/bare/timing", {"steps": 0}, 422), ("/timing", {}, 422),
        ("/timing", {"run": ["bare"] * 201}, 422),
    ):  # fmt: skip
        assert client.get(f"/api/v1{path}", params=params).status_code == status
    send(client, frame({"loss": [1.0] * 5, "samples_per_s": [10.0, 20.0, 30.0, 40.0, 50.0]}, run="untimed"))
    told = timing(client, "untimed")
    assert (told["rates"]["samples_per_s"]["p50"], told["window"]["steps"]) == (30.0, 5)
    assert told["series"] == told["shares"] == {}
    asked = client.get("/api/v1/timing", params={"run": ["bare", "untimed", "x"]}).json()["timing"]
    assert asked == {"bare": NOTHING, "untimed": told}, "many runs at once"


def test_the_window_is_the_newest_steps_and_then_the_whole_run(client: TestClient) -> None:
    times = [1.0] * 200 + [0.1] * 100
    rates = [1 / time for time in times]
    send(client, frame({"step_time_s": times, "tokens_per_s": rates}, run="window"))
    live = timing(client, "window")
    send(client, frame({}, run="window", seq=2, events=[FINISHED]))
    ended = timing(client, "window")
    window = {"from_step": 201, "to_step": 300, "steps": 100, "whole_run": False, "bucket_steps": 1}
    assert live["window"] == window
    assert ended["window"] == {**window, "from_step": 1, "steps": 300, "whole_run": True}
    for told, step_s, rate in ((live, 0.1, 10.0), (ended, 1.0, 1.0)):
        found = [told["series"]["step_time_s"]["p50"], told["rates"]["tokens_per_s"]["p50"]]
        assert found == pytest.approx([step_s, rate])


def test_a_whole_run_in_buckets_keeps_its_mean_and_its_shares(client: TestClient) -> None:
    """Of more steps than are read one by one."""
    draw = random.Random(2)
    steps = WHOLE_POINTS + 1000
    times = [draw.uniform(0.1, 0.2) for _ in range(steps)]
    pauses = range(1000, steps, 1000)
    for seq, first in enumerate(range(0, steps, 1000), start=1):
        piece = times[first : first + 1000]
        columns = {"step_time_s": piece, "phase/forward_s": [time / 2 for time in piece]}
        send(client, frame(columns, run="whole", seq=seq, first_step=first + 1))
    for seq, step in enumerate(pauses, start=100):
        send(client, frame({"phase/eval_s": [30.0]}, run="whole", seq=seq, first_step=step))
    send(client, frame({}, run="whole", seq=500, events=[FINISHED]))
    told = timing(client, "whole")
    assert told["window"] == {"from_step": 1, "to_step": steps, "steps": steps, "whole_run": True, "bucket_steps": 2}
    found = told["series"]["step_time_s"]
    assert (found["mean"], found["count"]) == (pytest.approx(statistics.mean(times)), steps)
    assert found["p50"] == pytest.approx(statistics.median(times), rel=0.02)
    assert told["series"]["phase/eval_s"]["count"] == len(pauses)
    total = sum(times) + sum(max(0.0, 30.0 - (times[step - 1] + times[step]) / 2) for step in pauses)
    assert told["shares"]["evaluation"] == pytest.approx(30.0 * len(pauses) / total, rel=0.01)


def test_a_value_that_is_no_number_counts_nowhere() -> None:
    told = figures_of({"step_time_s": [0.1, float("nan"), 0.3], "tokens_per_s": [10.0, 20.0, float("inf")]})
    assert (told.series["step_time_s"].count, told.series["step_time_s"].p50) == (2, 0.2)
    assert (told.rates["tokens_per_s"].count, told.rates["tokens_per_s"].p50) == (1, 10.0)
    assert timing_of({"step_time_s": samples("step_time_s", [float("nan")])}, whole_run=True).window is None
    assert [quantile([5.0], 0.99), quantile([1.0, 2.0], 0.5), quantile([1.0, 2.0, 4.0], 1.0)] == [5.0, 1.5, 4.0]
    windows = [figures_of({"step_time_s": [0.1] * count}).window for count in (1200, 1)]
    assert [str(window) for window in windows] == ["the newest 1,200 steps", "the newest step"]
