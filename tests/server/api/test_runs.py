"""Runs and what hangs on them: lists, changes, deletion, series, export, events."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from fastapi.testclient import TestClient
from frames import state
from pyarrow import parquet

from perfagent.wire import Event


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("runs")) as running:
        yield running


def start(name: str, **data: object) -> Event:
    return state("starting", time=1_700_000_000.0, name=name, **data)


def get(client: TestClient, path: str, **query: Any) -> Any:
    return client.get(f"/api/v1/runs{path}", params=query)


def found(client: TestClient, **query: Any) -> list[str]:
    return [run["run"] for run in get(client, "", **query).json()["runs"]]


@pytest.mark.sql
def test_runs_are_listed_newest_first_and_page_by_page(client: TestClient) -> None:
    for number in range(7):
        send(client, frame({"loss": [1.0]}, run=f"page{number}", project="pages"))
    seen, cursor = [], {}
    while True:
        page = get(client, "", limit=3, project="pages", **cursor).json()
        seen += [run["run"] for run in page["runs"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert seen == [f"page{number}" for number in reversed(range(7))]


@pytest.mark.sql
def test_runs_are_filtered_by_project_name_state_and_tag(client: TestClient) -> None:
    tags = ["Big", 'a"b', 'a "b"', "größe", "x"]
    send(client, frame({"loss": [1.0]}, run="a", project="x", events=[start("first", tags=tags)]))
    send(client, frame({"loss": [1.0]}, run="b", project="y", events=[start("second", tags=["Bigger"])]))
    assert (found(client, project="x"), found(client, name="second")) == (["a"], ["b"])
    assert found(client, project=["x"], state="running") == ["a"]
    assert found(client, project="x", state="finished") == []
    assert [found(client, tag=tag) for tag in tags] == [["a"]] * 5
    assert [found(client, tag=tag) for tag in ("big", "ig", ", ", ",", "", "%")] == [[]] * 6


@pytest.mark.sql
def test_name_tags_and_notes_can_be_changed(client: TestClient) -> None:
    send(client, frame({"loss": [1.0]}, run="named"))

    def change(**values: Any) -> Any:
        return client.patch("/api/v1/runs/named", json=values)

    assert change(name="better", tags=["keep"], notes="<b>look</b>").status_code == 200
    run = get(client, "/named").json()
    assert (run["name"], run["tags"], run["notes"]) == ("better", ["keep"], "<b>look</b>")
    change(notes="")
    for name in ("", "   ", "a\nb", "a\x00b", "x" * 257):  # that no job could give it
        assert change(name=name).json()["error"]["field"] == "name"
    run = get(client, "/named").json()
    assert (run["name"], run["notes"]) == ("better", "")


@pytest.mark.sql
def test_a_deleted_run_is_gone_and_others_stay(client: TestClient) -> None:
    for run in ("gone", "stays"):
        send(client, frame({"loss": [1.0]}, run=run, project="deleted"))
    assert client.delete("/api/v1/runs/gone").status_code == 401
    assert client.delete("/api/v1/runs/gone", headers=ADMIN).status_code == 204
    assert found(client, project="deleted") == ["stays"]
    for path in ("", "/latest", "/series?name=loss", "/ranks?name=loss", "/names", "/events", "/export"):
        answer = get(client, f"/gone{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path


def test_series_ranks_names_and_latest_come_as_json(client: TestClient) -> None:
    values = [1.0] * 5000
    values[1233] = 1e6
    send(client, frame({"loss": values, "acc": [0.5] * 4999 + [math.nan]}, run="long"))
    series = get(client, "/long/series", name="loss", points=100).json()
    assert (len(series["step"]) <= 100, series["exact"], max(series["max"])) == (True, False, 1e6)
    close = get(client, "/long/series", name="loss", **{"from": 1_230, "to": 1_240}).json()
    assert (close["exact"], close["step"]) == (True, list(range(1_230, 1_241)))
    assert get(client, "/long/names").json() == {"names": ["acc", "loss"], "loss": "loss", "evaluations": []}
    latest = get(client, "/long/latest").json()
    assert latest["loss"] == {"value": 1.0, "step": 5000, "time": 1_700_005_000.0, "rank": 0}
    assert latest["acc"]["value"] == "NaN"
    for rank in range(2):
        send(client, frame({"step_time_s": [float(rank), float(rank)]}, run="ranks", rank=rank))
    matrix = get(client, "/ranks/ranks", name="step_time_s").json()
    assert (matrix["ranks"], matrix["unit"], matrix["mean"]) == ([0, 1], "s", [[0.0, 0.0], [1.0, 1.0]])


EXACT = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 2.0, math.nan, math.inf, -math.inf]


def bits(value: Any) -> bytes:
    return struct.pack("<d", float(value))


def exported(client: TestClient, run: str, kind: str) -> list[dict[str, Any]]:
    answer = get(client, f"/{run}/export", format=kind)
    assert answer.status_code == 200
    if kind == "parquet":
        assert answer.headers["content-type"] == "application/vnd.apache.parquet"
        return list(parquet.read_table(io.BytesIO(answer.content)).to_pylist())
    if kind == "csv":
        return list(csv.DictReader(io.StringIO(answer.text)))
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_x06_export_gives_every_sample_back_to_the_bit(client: TestClient, kind: str) -> None:
    run = f"export-{kind}"
    send(client, frame({"x": EXACT, "=cmd()": [1.0] * len(EXACT)}, run=run))
    send(client, frame({"long": list(range(5001))}, run=run, seq=2))
    send(client, frame({"x": [7.0]}, run=run, rank=3))
    rows = exported(client, run, kind)
    assert list(rows[0]) == ["name", "rank", "step", "time", "value"]
    mine = [row for row in rows if row["name"] == "x"]
    assert [(int(row["rank"]), int(row["step"])) for row in mine] == [*((0, at + 1) for at in range(9)), (3, 1)]
    assert [bits(row["value"]) for row in mine] == [bits(value) for value in (*EXACT, 7.0)]
    assert [float(row["value"]) for row in rows if row["name"] == "long"] == list(range(5001))
    assert {row["name"] for row in rows} == {"x", "long", "'=cmd()" if kind == "csv" else "=cmd()"}, "no formula in CSV"
    answer = get(client, f"/{run}/export", format="xlsx")
    assert (answer.status_code, "jsonl, csv, parquet" in answer.json()["error"]["message"]) == (400, True)


@pytest.mark.sql
def test_console_lines_are_read_back_newest_last(client: TestClient) -> None:
    lines = [Event(kind="log", time=float(n), data={"lines": [f"line {n}"], "stream": "stdout"}) for n in range(5)]
    send(client, frame({}, run="console", events=[start("a"), *lines]))
    tail = get(client, "/console/events", kind="log", limit=2).json()["events"]
    assert [event["data"]["lines"] for event in tail] == [["line 3"], ["line 4"]]
    older = get(client, "/console/events", kind="log", before=tail[0]["id"]).json()["events"]
    assert [event["data"]["lines"][0] for event in older] == ["line 0", "line 1", "line 2"]
