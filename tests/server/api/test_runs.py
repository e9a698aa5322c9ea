"""Runs and what hangs on them: lists, changes, deletion, series, export, events."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from api_builders import ADMIN, api, frame, send
from pyarrow import parquet

from perfagent.wire import Event, LogRow
from perfagent_server.routes.parquet import write


def start(name: str, **data: object) -> Event:
    return Event(kind="state", time=1_700_000_000.0, data={"state": "starting", "name": name, **data})


def test_runs_are_listed_newest_first_and_page_by_page(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for number in range(7):
            send(client, frame({"loss": [1.0]}, run=f"r{number}"))
        seen, cursor = [], None
        while True:
            page = client.get("/api/v1/runs", params={"limit": 3, **({"cursor": cursor} if cursor else {})}).json()
            seen += [run["run"] for run in page["runs"]]
            cursor = page["next"]
            if cursor is None:
                break
        assert seen == [f"r{number}" for number in reversed(range(7))]


def test_runs_are_filtered_by_project_name_state_and_tag(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(
            client, frame({"loss": [1.0]}, run="a", project="x", events=[start("first", tags=["big", 'a"b', "größe"])])
        )
        send(client, frame({"loss": [1.0]}, run="b", project="y", events=[start("second", tags=["bigger"])]))

        def found(**query: str) -> list[str]:
            return [run["run"] for run in client.get("/api/v1/runs", params=query).json()["runs"]]

        assert found(project="x") == ["a"]
        assert found(name="second") == ["b"]
        assert found(state="running") == ["b", "a"]
        assert found(state="finished") == []
        assert found(tag="big") == ["a"]
        assert found(tag='a"b') == ["a"]
        assert found(tag="größe") == ["a"]
        assert found(tag="%") == []


def test_name_tags_and_notes_can_be_changed(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        change = {"name": "better", "tags": ["keep"], "notes": "<b>look</b>"}
        changed = client.patch("/api/v1/runs/r1", json=change)
        assert changed.status_code == 200, changed.text
        run = client.get("/api/v1/runs/r1").json()
        assert (run["name"], run["tags"], run["notes"]) == ("better", ["keep"], "<b>look</b>")
        client.patch("/api/v1/runs/r1", json={"notes": ""})
        run = client.get("/api/v1/runs/r1").json()
        assert (run["name"], run["notes"]) == ("better", "")


def test_what_a_job_was_started_with_comes_in_pieces_and_lists_leave_the_long_ones_out(tmp_path: Path) -> None:
    def context(**data: object) -> Event:
        return Event(kind="context", time=1_700_000_000.0, data=data)

    with api(tmp_path) as client:
        events = [
            start("first", config={"lr": 0.1}, notes="look here"),
            context(config={"argparse": {"seed": 1}}, git={"branch": "main"}),
        ]
        send(client, frame({"loss": [1.0]}, events=events))
        packages = {"torch": "2.13.0"}
        send(
            client,
            frame({"loss": [1.0]}, seq=2, events=[context(git={"branch": "main", "dirty": True}, packages=packages)]),
        )
        run = client.get("/api/v1/runs/r1").json()
        assert run["config"] == {"lr": 0.1, "argparse": {"seed": 1}}
        assert run["meta"] == {"git": {"branch": "main", "dirty": True}, "packages": packages}
        assert run["notes"] == "look here"
        assert run["state"] == "running"
        assert client.get("/api/v1/runs").json()["runs"][0]["meta"] == {"git": {"branch": "main", "dirty": True}}

        client.patch("/api/v1/runs/r1", json={"notes": "seen"})
        send(client, frame({"loss": [1.0]}, seq=3, events=[start("first", notes="look here")]))
        assert client.get("/api/v1/runs/r1").json()["notes"] == "seen"


def test_a_deleted_run_is_gone_and_others_stay(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}, run="r1"))
        send(client, frame({"loss": [1.0]}, run="r2"))
        assert client.delete("/api/v1/runs/r1").status_code == 401
        assert client.delete("/api/v1/runs/r1", headers=ADMIN).status_code == 204
        assert [run["run"] for run in client.get("/api/v1/runs").json()["runs"]] == ["r2"]
        for path in ("", "/latest", "/series?name=loss", "/ranks?name=loss", "/names", "/events", "/export"):
            answer = client.get(f"/api/v1/runs/r1{path}")
            assert answer.status_code == 404, path
            assert answer.json()["error"]["code"] == "not_found"


def test_one_extreme_step_of_many_is_in_its_bucket(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        values = [1.0] * 20_000
        values[12_345] = 1e6
        send(client, frame({"loss": values}))
        series = client.get("/api/v1/runs/r1/series", params={"name": "loss", "points": 100}).json()
        assert len(series["step"]) <= 100
        assert series["exact"] is False
        assert max(series["max"]) == 1e6
        close = client.get("/api/v1/runs/r1/series", params={"name": "loss", "from": 12_340, "to": 12_350}).json()
        assert close["exact"] is True
        assert close["step"] == list(range(12_340, 12_351))
        assert close["max"][close["step"].index(12_346)] == 1e6


def test_ranks_come_as_a_matrix(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for rank in range(4):
            send(client, frame({"step_time_s": [float(rank), float(rank)]}, rank=rank))
        matrix = client.get("/api/v1/runs/r1/ranks", params={"name": "step_time_s"}).json()
        assert matrix["ranks"] == [0, 1, 2, 3]
        assert matrix["mean"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert matrix["unit"] == "s"


EXACT = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 2.0, math.nan, math.inf, -math.inf]


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_x06_export_gives_every_sample_back_to_the_bit(tmp_path: Path, kind: str) -> None:
    with api(tmp_path) as client:
        send(client, frame({"x": EXACT, "=cmd()": [1.0] * len(EXACT)}))
        answer = client.get("/api/v1/runs/r1/export", params={"format": kind})
        if kind == "jsonl":
            rows = [json.loads(line) for line in answer.text.splitlines()]
        else:
            rows = list(csv.DictReader(io.StringIO(answer.text)))
        assert list(rows[0]) == ["name", "rank", "step", "time", "value"]
        mine = [row for row in rows if row["name"] == "x"]
        assert [int(row["step"]) for row in mine] == list(range(1, len(EXACT) + 1))
        assert [bits(float(row["value"])) for row in mine] == [bits(value) for value in EXACT]
        formula = {row["name"] for row in rows} - {"x"}
        assert formula == ({"'=cmd()"} if kind == "csv" else {"=cmd()"})


def test_a_parquet_export_gives_every_sample_back_to_the_bit(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"x": EXACT, "=cmd()": [1.0] * len(EXACT)}))
        send(client, frame({"x": [7.0]}, rank=3))
        answer = client.get("/api/v1/runs/r1/export", params={"format": "parquet"})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/vnd.apache.parquet")
        rows = parquet.read_table(io.BytesIO(answer.content)).to_pylist()
        lines = [json.loads(line) for line in client.get("/api/v1/runs/r1/export").text.splitlines()]
    assert [bits(row["value"]) for row in rows if (row["name"], row["rank"]) == ("x", 0)] == [
        bits(value) for value in EXACT
    ]
    assert [{**row, "value": None} for row in rows] == [{**line, "value": None} for line in lines]


def test_a_long_parquet_export_is_complete_and_sent_in_pieces(tmp_path: Path) -> None:
    rows = [LogRow(name="x", rank=0, step=step, time=1.0, value=step / 3) for step in range(200_000)]
    pieces = list(write(rows[place : place + 2000] for place in range(0, len(rows), 2000)))
    file = parquet.ParquetFile(io.BytesIO(b"".join(pieces)))
    assert file.num_row_groups > 2
    assert len([piece for piece in pieces if piece]) > 2
    assert file.read(["value"]).column(0).to_pylist() == [row.value for row in rows]


def test_a_parquet_export_of_a_run_without_samples_is_an_empty_table(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({}, events=[start("a")]))
        answer = client.get("/api/v1/runs/r1/export", params={"format": "parquet"})
    table = parquet.read_table(io.BytesIO(answer.content))
    assert (table.num_rows, table.column_names) == (0, ["name", "rank", "step", "time", "value"])


def test_export_in_another_format_says_which_there_are(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"x": [1.0]}))
        answer = client.get("/api/v1/runs/r1/export", params={"format": "xlsx"})
        assert answer.status_code == 400
        assert "jsonl, csv, parquet" in answer.json()["error"]["message"]


def test_a_long_export_is_complete(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"x": list(range(5001))}))
        lines = client.get("/api/v1/runs/r1/export").text.splitlines()
        assert [json.loads(line)["value"] for line in lines] == list(range(5001))


def test_console_lines_are_read_back_newest_last(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        events = [Event(kind="log", time=float(n), data={"lines": [f"line {n}"], "stream": "stdout"}) for n in range(5)]
        send(client, frame({}, events=[start("a"), *events]))
        tail = client.get("/api/v1/runs/r1/events", params={"kind": "log", "limit": 2}).json()["events"]
        assert [event["data"]["lines"] for event in tail] == [["line 3"], ["line 4"]]
        older = client.get("/api/v1/runs/r1/events", params={"kind": "log", "before": tail[0]["id"]}).json()["events"]
        assert [event["data"]["lines"][0] for event in older] == ["line 0", "line 1", "line 2"]


def test_names_and_latest_tell_what_there_is(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [2.0, 1.0], "acc": [0.5, float("nan")]}))
        assert client.get("/api/v1/runs/r1/names").json() == {
            "names": ["acc", "loss"],
            "loss": "loss",
            "evaluations": [],
        }
        latest = client.get("/api/v1/runs/r1/latest").json()
        assert latest["loss"] == {"value": 1.0, "step": 2, "time": 1_700_000_002.0, "rank": 0}
        assert latest["acc"]["value"] == "NaN"


def test_data_of_an_event_that_json_does_not_have_is_shown_as_text(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        data = {"bytes": b"\x00\x01", "moment": datetime(2026, 1, 2, tzinfo=UTC), "other": msgspec.msgpack.Ext(5, b"x")}
        send(client, frame({"loss": [1.0]}, events=[Event(kind="log", time=1.0, data=data)]))
        (event,) = client.get("/api/v1/runs/r1/events").json()["events"]
        assert event["data"] == {"bytes": "AAE=", "moment": "2026-01-02T00:00:00+00:00", "other": "eA=="}


def test_a_tag_is_found_as_it_is_written(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}, events=[start("a", tags=["Prod", "x", 'a "b"', "é"])]))
        found = {
            tag: len(client.get("/api/v1/runs", params={"tag": tag}).json()["runs"])
            for tag in ("Prod", 'a "b"', "é", "prod", "rod", ", ", ",", "")
        }
        assert found == {"Prod": 1, 'a "b"': 1, "é": 1, "prod": 0, "rod": 0, ", ": 0, ",": 0, "": 0}


@pytest.mark.parametrize("name", ["", "   ", "a\nb", "a\x00b", "x" * 257])
def test_a_run_is_given_no_name_that_no_job_could_give_it(tmp_path: Path, name: str) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        assert client.patch("/api/v1/runs/r1", json={"name": name}).json()["error"]["field"] == "name"


def test_a_query_parameter_that_is_misspelt_is_refused_by_name(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        refused = client.get("/api/v1/runs?projct=x")
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "projct")
        assert "project, name, state, tag" in refused.json()["error"]["message"]
        assert client.get("/api/v1/runs/r1/series?name=loss&form=5").status_code == 422
        assert client.get("/api/v1/runs/r1/series?name=loss&from=1").status_code == 200
        assert client.get("/api/v1/runs/r1?x=1").status_code == 422
