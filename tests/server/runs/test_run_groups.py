"""Runs in groups: figures against a hand computation, on each database, and who sees which runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from api_builders import ADMIN, api, frame, send, services_of
from fastapi.testclient import TestClient
from frames import state

from perfagent.wire import Series
from perfagent_server.runs.goal import goal_in, goals_among
from perfagent_server.runs.run_groups import band_of

pytestmark = pytest.mark.sql

RATES = {"a": (0.1, 0.5), "b": (0.1, 0.7), "c": (1e-3, 0.8), "d": (0.001, 0.6), "e": (None, 0.9), "f": (0.1, math.nan)}
"""Run -> its setting `lr`, and its newest accuracy."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("groups")) as client:
        for place, (name, (rate, accuracy)) in enumerate(RATES.items()):
            config = {"seed": place, "opt": {"name": "adam"}} | ({} if rate is None else {"lr": rate})
            tags = ["night", *(["odd"] if place % 2 else [])]
            said = state("running", config=config, group="first half" if place < 3 else "second", tags=tags)
            values = {"loss": [4.0, 2.0, 1.0 + place], "val/acc": [0.1, 0.2, accuracy]}
            send(client, frame(values, run=name, name=f"run {name}", project="p", events=[said]))
        send(
            client,
            frame({"val/acc": [1.0]}, run="x", name="x", project="other", events=[state("running", group="second")]),
        )
        yield client


def asked(client: TestClient, path: str = "", **query: Any) -> Any:
    answer = client.get(f"/api/v1/groups{path}", params={"project": "p", **query}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_group_has_mean_spread_and_best_of_its_runs(client: TestClient) -> None:
    found = asked(client, by="config.lr", metrics="loss")
    assert (found["goal"], found["runs"], found["more"]) == ("max:val/acc", 6, 0)
    assert [one["value"] for one in found["groups"]] == ["0.001", "0.1", None], "the best by the mean first"
    of = {one["value"]: one for one in found["groups"]}
    assert of["0.1"]["metrics"]["val/acc"]["mean"] == pytest.approx(0.6)
    assert of["0.1"]["metrics"]["val/acc"]["spread"] == pytest.approx(np.std([0.5, 0.7], ddof=1))
    assert (of["0.1"]["runs"], of["0.1"]["metrics"]["val/acc"]["n"]) == (3, 2), "NaN is a run, and no value"
    assert of["0.1"]["metrics"]["loss"]["mean"] == pytest.approx((1 + 2 + 6) / 3)
    assert found["best"] == {"run": "e", "name": "run e", "value": 0.9}
    assert of["0.1"]["best"] == {"run": "b", "name": "run b", "value": 0.7}
    assert of[None]["metrics"]["val/acc"] == {"mean": 0.9, "spread": None, "n": 1}
    assert of[None]["states"] == {"running": 1}


def test_the_goal_says_which_way_is_up(client: TestClient) -> None:
    found = asked(client, by="config.lr", goal="min:val/acc")
    assert [one["value"] for one in found["groups"]] == ["0.1", "0.001", None]
    assert found["groups"][0]["best"]["run"] == "a"
    assert [goal_in(name).higher for name in ("val/acc", "val/loss", "max:val/loss", "tokens_per_s")] == [
        True,
        False,
        True,
        True,
    ]
    names = ["host/cpu_pct", "loss", "train/reward", "val/loss", "val/top5", "grad_norm/head"]
    assert [one.name for one in goals_among(names)] == ["val/top5", "val/loss", "train/reward", "loss"]


def test_a_group_is_found_again_by_its_search(client: TestClient) -> None:
    sizes: dict[str, list[int]] = {"config.lr": [2, 3], "group": [3, 3], "tag": [3, 6], "config.seed": [1] * 6}
    for by, expected in sizes.items():
        groups = [one for one in asked(client, by=by)["groups"] if one["value"] is not None]
        assert sorted(one["runs"] for one in groups) == expected
        for one in groups:
            assert asked(client, by=by, q=one["search"])["runs"] == one["runs"], one["search"]


def test_one_can_group_by_what_differs(client: TestClient) -> None:
    assert asked(client)["choices"] == ["group", "tag", "config.lr", "config.seed"]


def test_settings_stand_beside_results_and_seeds_last(client: TestClient) -> None:
    found = asked(client, "/runs", by="group")
    assert [one["name"] for one in found["settings"]] == ["lr", "seed"]
    assert {one["run"]: one["group"] for one in found["runs"]}["a"] == "first half"
    rows = dict(zip((one["run"] for one in found["runs"]), found["results"][0]["values"], strict=True))
    assert (rows["c"], rows["f"]) == (0.8, None)
    assert found["best"]["run"] == "e"
    assert [one["run"] for one in asked(client, "/runs", run=["a", "b"])["runs"]] == ["b", "a"]


def test_a_band_is_mean_lowest_and_highest(client: TestClient) -> None:
    found = asked(client, "/series", by="group", name="val/acc")["groups"]
    first = next(one["band"] for one in found if one["value"] == "first half")
    assert first["mean"] == pytest.approx([0.1, 0.2, (0.5 + 0.7 + 0.8) / 3])
    assert (first["low"][-1], first["high"][-1], first["runs"]) == (0.5, 0.8, [3, 3, 3])


def line(step: list[int], mean: list[float]) -> Series:
    rest = {"min": mean, "max": mean, "count": [1] * len(step), "nonfinite": [0] * len(step)}
    return Series(name="x", rank="all", unit="", exact=True, step=step, mean=mean, **rest)


def test_runs_of_other_steps_meet_between_their_samples() -> None:
    band = band_of([line([0, 10], [0.0, 1.0]), line([5, 15], [3.0, 5.0]), line([5], [math.nan])], 100)
    assert band.step == [0, 5, 10, 15]
    assert band.mean == pytest.approx([0.0, (0.5 + 3) / 2, (1 + 4) / 2, 5.0])
    assert band.runs == [1, 2, 2, 1]
    assert len(band_of([line(list(range(1000)), [0.5] * 1000)], 50).step) == 50


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("", {"by": "rate"}, "allowed are group, tag and config.NAME"), ("", {"by": "tag", "goal": "top:x"}, "give max:NAME"),
        ("", {"by": "tag", "state": "odd"}, "allowed are starting"),
        ("/series", {"by": "tag", "name": "x", "from": 2, "to": 1}, "must not"),
    ],
)  # fmt: skip
def test_what_cannot_be_grouped_is_refused(client: TestClient, path: str, query: dict[str, Any], said: str) -> None:
    answer = client.get(f"/api/v1/groups{path}", params=query, headers=ADMIN)
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"]


def test_runs_of_other_projects_are_in_no_group(client: TestClient) -> None:
    token = services_of(client).access.keys.create("read", project="p")[1]
    answer = client.get("/api/v1/groups", params={"by": "group"}, headers={"Authorization": f"Bearer {token}"})
    assert {one["value"]: one["runs"] for one in answer.json()["groups"]} == {"first half": 3, "second": 3}
