"""Arithmetic over series: what it computes, at which steps, where it has gaps, and what it says of a mistake."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import api, frame, send
from fastapi.testclient import TestClient

A, B = [4.0, 6.0, 8.0, 10.0], [2.0, 0.0, math.nan, 5.0]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("expressions")) as client:
        send(client, frame({"a": A, "b/c": B, "step_time_s": A, "phase/data_s": A, "my loss": A}, run="r1"))
        send(client, frame({"rare": [1.0]}, run="r1", seq=2, first_step=3))
        send(client, frame({"x": [float(step) for step in range(1000)], "y": [1.0] * 1000}, run="long"))
        yield client


def asked(client: TestClient, expression: str, run: str = "r1", **more: Any) -> dict[str, Any]:
    answer = client.get(f"/api/v1/runs/{run}/series", params={"expression": expression, **more})
    return {"status": answer.status_code, **answer.json()}


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("a - 1", [3, 5, 7, 9]),
        ("2 + a * -3", [-10, -16, -22, -28]),
        ("( a - 2 ) × 2 ÷ 4", [1, 2, 3, 4]),
        ("-(a − `my loss`)", [0, 0, 0, 0]),
        ("a - a - a", [-4, -6, -8, -10]),
        ("a / b/c", [2, "NaN", "NaN", 2]),
    ],
)
def test_values_are_those_of_school(client: TestClient, expression: str, values: list[float | str]) -> None:
    """A division by zero and a value that is not finite are gaps."""
    assert asked(client, expression)["mean"] == values


def test_it_has_the_steps_of_the_series_that_has_fewest(client: TestClient) -> None:
    found = asked(client, "a + rare")
    assert (found["step"], found["mean"]) == ([3], [A[2] + 1.0])


def test_between_its_steps_a_series_lies_on_a_line(client: TestClient) -> None:
    for seq, (step, name, value) in enumerate(
        [(1, "train", 1.0), (2, "val", 8.0), (5, "train", 5.0), (9, "val", 9.0)], 1
    ):
        send(client, frame({name: [value]}, run="apart", seq=seq, first_step=step))
    found = asked(client, "val - train", "apart")
    assert (found["step"], found["mean"]) == ([2, 9], [6.0, "NaN"])


def test_few_points_are_computed_of_the_means_of_buckets(client: TestClient) -> None:
    whole, coarse = asked(client, "x * y", "long", points=2000), asked(client, "x * y", "long", points=10)
    assert whole["mean"] == [float(step) for step in range(1000)]
    assert len(coarse["mean"]) <= 10
    means = client.get("/api/v1/runs/long/series", params={"name": "x", "points": 10}).json()["mean"]
    assert coarse["mean"] == means


def test_the_unit_stays_where_it_has_one(client: TestClient) -> None:
    units = [
        asked(client, text)["unit"]
        for text in ("step_time_s - phase/data_s", "phase/data_s / step_time_s", "2 * step_time_s")
    ]
    assert units == ["s", "", "s"]


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("a-b", "no series `a-b`; signs stand between spaces"), ("a -", "missing at its end"),
        ("a b/c", "a sign is missing before `b/c`"), ("* a", "missing before `*`"), ("1 + 2", "it has 0 series"),
        ("(a", "not closed"), ("a )", "not opened"), ("", "it is empty"),
        ("a + " * 80 + "a", "characters"), ("`a", "backtick"), ("(" * 200 + "a", "not closed"),
    ],
)  # fmt: skip
def test_a_mistake_is_said(client: TestClient, expression: str, says: str) -> None:
    found = asked(client, expression)
    assert found["status"] == 422
    assert says in found["error"]["message"]


def test_either_a_name_or_an_expression_is_given(client: TestClient) -> None:
    for query in ({}, {"name": "a", "expression": "a"}):
        assert client.get("/api/v1/runs/r1/series", params=query).status_code == 422


def test_a_panel_is_kept_by_project_changed_and_bounded(tmp_path: Path) -> None:
    with api(tmp_path) as client:

        def put(ident: str, project: str = "p", **form: Any) -> Any:
            return client.put(f"/api/v1/panels/{ident}", params={"project": project}, json=form)

        first = put("one", title="Gap", lines=["a - b", "`my loss`"])
        assert first.status_code == 200
        assert [line["names"] for line in first.json()["lines"]] == [["a", "b"], ["my loss"]]
        put("two", "other", title="Elsewhere", lines=["a"])
        changed = put("one", title="Ratio", lines=["a / b"]).json()
        listed = client.get("/api/v1/panels", params={"project": "p"}).json()["panels"]
        assert listed == [changed]
        wrong = put("three", title="x", lines=["a", "a +"])
        assert (wrong.status_code, "lines[1]" in wrong.json()["error"]["message"]) == (422, True)
        for form in ({"title": "", "lines": ["a"]}, {"title": "x", "lines": []}, {"title": "x", "lines": ["a"] * 9}):
            assert put("three", **form).status_code == 422
        assert put("No/id", title="x", lines=["a"]).status_code in (404, 405, 422)
        answers = [put(f"more-{number}", title="x", lines=["a"]).status_code for number in range(50)]
        assert answers == [200] * 49 + [409]
        gone = [client.delete("/api/v1/panels/one", params={"project": "p"}).status_code for _ in range(2)]
        assert gone == [204, 404]


def test_annotations_go_with_their_run(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"a": A}, run="r1"))
        path = "/api/v1/runs/r1/annotations"
        for step, text in ((9, "later"), (3, " first ")):
            assert client.post(path, json={"step": step, "text": text}).status_code == 201
        for body in ({"step": -1, "text": "x"}, {"step": 1, "text": "  "}, {"step": 1, "text": "x" * 501}, {"step": 1}):
            assert client.post(path, json=body).status_code == 422
        listed = client.get(path).json()["annotations"]
        assert [(one["step"], one["text"]) for one in listed] == [(3, "first"), (9, "later")]
        assert client.delete(f"{path}/{listed[0]['id']}").status_code == 204
        assert client.delete(f"{path}/{listed[0]['id']}").status_code == 404
        assert [one["step"] for one in client.get(path).json()["annotations"]] == [9]
