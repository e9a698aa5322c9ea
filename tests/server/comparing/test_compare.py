"""`GET /compare`: runs, and windows of runs, beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_builders import ADMIN, api, frame, send
from fastapi.testclient import TestClient

from perfagent.wire import Event
from perfagent_server.comparing.differences import differences_of
from perfagent_server.comparing.windows import Window, window_of


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder: Path = tmp_path_factory.mktemp("compare")
    with api(folder) as client:
        run(client, "slow", seconds=0.5, wait=0.25, config={"lr": 0.1, "workers": 0, "seed": 1}, floor=1.0)
        run(client, "fast", seconds=0.3, wait=0.02, config={"lr": 0.1, "workers": 8, "seed": 1}, floor=0.8)
        run(client, "twin", seconds=0.5, wait=0.25, config={"lr": 0.1, "workers": 0, "seed": 2}, floor=1.0, luck=1)
        run(client, "stalls", seconds=0.5, wait=0.25, config={}, floor=1.0, luck=2, stall=0.6)
        run(client, "drifts", seconds=0.5, wait=0.0, config={}, floor=1.0, steps=389, drift=1.0)
        run(client, "short", seconds=0.5, wait=0.0, config={}, floor=1.0, steps=8)
        yield client


def run(
    client: TestClient, name: str, *, seconds: float, wait: float, config: dict[str, Any], floor: float, steps: int = 400,
    luck: int = 0, stall: float = 0.0, drift: float = 0.0,
) -> None:  # fmt: skip
    random = np.random.default_rng(luck)
    step = np.arange(1, steps + 1)
    times = seconds * np.exp(random.normal(0, 0.05, steps))
    times[:5] *= 10  # compiling
    times[::10] += stall
    times += drift * (step > steps / 2)
    values = {
        "loss": (floor + 2 / step).tolist(),
        "step_time_s": times.tolist(),
        "samples_per_s": (32 / times).tolist(),
        "phase/data_s": np.full(steps, wait).tolist(),
        "phase/forward_s": (times - wait).tolist(),
        "process/rss_bytes": np.full(steps, 1e9 * (1 + floor)).tolist(),
    }
    packages = {"torch": "2.13", "numpy": name}
    state = {"state": "starting", "name": name.title(), "config": config, "packages": packages}
    begins = Event(kind="state", time=1_700_000_000.0, step=0, data=state)
    send(client, frame(values, run=name, events=[begins]))


def compared(client: TestClient, *runs: str) -> dict[str, Any]:
    answer = client.get("/api/v1/compare", params={"runs": runs}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def measure(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["speed"] if one["name"] == name)


def test_a_faster_run_is_told_with_its_interval(client: TestClient) -> None:
    found = compared(client, "slow", "fast")
    step = measure(found, "step_time_s")
    assert step["word"] == ["first", "faster"]
    assert step["ratio"][0] is None
    assert step["low"][1] < step["ratio"][1] < step["high"][1]
    assert step["low"][1] < 0.6 < step["high"][1]
    assert measure(found, "samples_per_s")["word"] == ["first", "faster"]
    assert step["values"] == [pytest.approx(0.5, rel=0.02), pytest.approx(0.3, rel=0.02)]
    data = measure(found, "phase/data_s")
    assert data["values"] == [pytest.approx(0.25), pytest.approx(0.02)]
    assert data["shares"] == [pytest.approx(0.5, rel=0.02), pytest.approx(0.067, rel=0.05)]
    assert [one["warm_up"] for one in found["sides"]] == [10, 10]


def test_a_stall_in_every_tenth_step_is_in_the_mean_alone(client: TestClient) -> None:
    found, equal = compared(client, "slow", "stalls"), compared(client, "slow", "twin")
    for one in (found, equal):
        assert measure(one, "step_time_s")["word"] == ["first", "same"]
    mean = found["mean_step"]
    assert (mean["word"], equal["mean_step"]["word"]) == (["first", "slower"], ["first", "same"])
    assert mean["values"] == [pytest.approx(0.5, rel=0.02), pytest.approx(0.56, rel=0.02)]
    assert mean["low"][1] < 1.12 < mean["high"][1]


def test_run_that_is_too_short_is_compared_at_its_last_step(client: TestClient) -> None:
    found = compared(client, "slow", "short")
    assert measure(found, "step_time_s")["word"] == ["first", "too_short"]
    assert [one["too_short"] for one in found["sides"]] == [False, True]
    assert measure(found, "step_time_s")["steps"] == [390, found["sides"][1]["steps"]]
    assert found["common_step"] == 8
    first, short = found["sides"]
    assert [first["loss_at"], short["loss_at"]] == pytest.approx([1 + 2 / 8] * 2)
    assert (first["loss_best"], first["loss_best_step"]) == (pytest.approx(1 + 2 / 400), 400)


def test_slow_steps_in_a_group_count_as_few(client: TestClient) -> None:
    step = measure(compared(client, "slow", "drifts"), "step_time_s")
    assert step["word"] == ["first", "too_short"]
    assert step["steps"][1] == 379
    assert step["independent"][1] < 20 <= step["independent"][0]


def test_only_what_differs_is_listed_the_users_own_first(client: TestClient) -> None:
    found = compared(client, "slow", "fast")
    differences = found["differences"]
    assert [(one["group"], one["name"], one["values"]) for one in differences["different"]] == [
        ("yours", "workers", [0, 8]), ("packages", "numpy", ["slow", "fast"]),
    ]  # fmt: skip
    assert (differences["equal"]["yours"], differences["equal"]["packages"]) == (2, 1)
    assert [one["peaks"]["process/rss_bytes"] for one in found["sides"]] == [2e9, 1.8e9]


def test_two_windows_of_one_run(client: TestClient) -> None:
    found = compared(client, "slow:1-40", "slow:200-400")
    assert [(one["begin"], one["end"]) for one in found["sides"]] == [(1, 40), (200, 400)]
    assert [one["warm_up"] for one in found["sides"]] == [0, 0]
    assert found["differences"]["different"] == []


def test_runs_are_found_by_name_and_what_is_not_there_is_told(client: TestClient) -> None:
    assert [one["run"] for one in compared(client, "Slow", "Fast")["sides"]] == ["slow", "fast"]
    for runs, status, said in (
        (["slow", "nowhere"], 404, "there is no run 'nowhere'"),
        (["slow"], 422, "at least 2"),
        (["slow", "fast:9-3"], 422, "ends before it begins"),
    ):
        answer = client.get("/api/v1/compare", params={"runs": runs}, headers=ADMIN)
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]


def test_a_window_is_written_behind_the_run() -> None:
    for text, window in {
        "a": Window("a"), "a:1-9": Window("a", 1, 9), "a:5-": Window("a", 5, None), "a:-9": Window("a", None, 9),
        "a:b": Window("a:b"), "x:y:1-2": Window("x:y", 1, 2), "a:-": Window("a:-"),
    }.items():  # fmt: skip
        assert window_of(text) == window


def test_true_is_not_one_and_a_missing_setting_is_a_difference() -> None:
    found = differences_of([({"a": 1, "b": 1, "c": 2}, {}), ({"a": True, "b": 1.0}, {})])
    assert [(one.name, one.values) for one in found.different] == [("a", [1, True]), ("c", [2, None])]
    assert found.equal["yours"] == 1
    found = differences_of([({}, {"pid": 1, "host": "a"}), ({}, {"pid": 2, "host": "b"})])
    assert [one.name for one in found.different] == ["host"], "a pid differs between any two runs"
