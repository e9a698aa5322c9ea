"""`GET /runs?with=...`: one screen of the table of runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from fastapi.testclient import TestClient
from frames import state
from sqlalchemy import insert

from perfagent_server.store.tables import alert


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("table")) as client:
        yield client


class Table:
    """The table of one project."""

    def __init__(self, client: TestClient, project: str) -> None:
        self.client, self.project = client, project

    def send(self, run: str, values: dict[str, list[float]] | None = None, **more: Any) -> None:
        """Names and runs are the same within the project."""
        sent = frame(values or {"loss": [1.0]}, run=f"{self.project}.{run}", name=run, project=self.project, **more)
        send(self.client, sent)

    def fire(self, run: str, severity: str, **changes: Any) -> None:
        """A row as the keeper of alerts writes it, so that the table is tested apart from the rules."""
        row = {
            "id": f"{self.project}-{run}-{severity}", "run": f"{self.project}.{run}", "rule": "a_rule",
            "severity": severity, "state": "firing", "title": "Something is wrong", "message": "", "since": 1.0, **changes,
        }  # fmt: skip
        services_of(self.client).database.write(lambda connection: connection.execute(insert(alert).values(row)))

    def screen(self, **asked: Any) -> dict[str, Any]:
        query = {"with": "verdict,latest,timing,trend", "project": self.project, **asked}
        answer = self.client.get("/api/v1/runs", params=query, headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def names(self, **asked: Any) -> list[str]:
        return [one["name"] for one in self.screen(**asked)["runs"]]


@pytest.fixture
def table(server: TestClient, request: pytest.FixtureRequest) -> Table:
    return Table(server, request.node.name[5:25])


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("config.lr = 1e-3", ["b", "c"]), ("config.lr=0.001 val/acc>0.6", ["c"]), ("val/acc >= 0.5", ["a", "b", "c"]),
        ("val/acc < 0.6", ["a", "b"]), ("config.opt.name != adam", ["b"]), ('config.opt.name = "SGD"', ["b"]),
        ("config.opt.name > adam", []), ("config.none = 1", []), ("loss = 0.25", ["c"]), ("/^[ab]$/", ["a", "b"]),
    ],
)  # fmt: skip
def test_runs_are_found_by_settings_and_newest_values(table: Table, asked: str, names: list[str]) -> None:
    for name, rate, optimizer, accuracy in (
        ("a", 0.1, "adam", 0.5),
        ("b", 0.001, "sgd", 0.5),
        ("c", 1e-3, "Adam", 0.7),
    ):
        said = state("running", config={"lr": rate, "opt": {"name": optimizer}})
        table.send(name, {"loss": [1.0, 0.25 if name == "c" else 0.5], "val/acc": [0.9, accuracy]}, events=[said])
    found = table.screen(q=asked)
    assert sorted(one["name"] for one in found["runs"]) == names
    assert found["counts"]["all"] == found["total"] == len(names)
    listed = table.client.get("/api/v1/runs", params={"project": table.project, "q": asked}, headers=ADMIN).json()[
        "runs"
    ]
    assert sorted(one["name"] for one in listed) == names


def test_a_row_has_its_verdict_newest_values_and_trend(table: Table) -> None:
    losses = [1 / step for step in range(1, 201)]
    table.send("a", {"loss": losses, "samples_per_s": [64.0] * 200, "step_time_s": [0.5] * 200})
    found = table.screen()
    row = found["runs"][0]
    assert (found["total"], found["next"], row["severity"], row["needs_attention"]) == (1, None, "healthy", False)
    assert row["latest"]["loss"] == 1 / 200
    shown = [row["timing"][name] for name in ("throughput", "throughput_name", "step_time_s")]
    assert shown == [64.0, "samples_per_s", 0.5]
    assert row["trend"][0] > row["trend"][-1] > 0
    assert {"rule", "title", "severity"} <= row["verdict"].keys()
    table.fire("a", "critical")  # the row is made again
    row = table.screen()["runs"][0]
    assert (row["severity"], row["needs_attention"]) == ("critical", True)
    assert (row["alerts"]["firing"], row["alerts"]["title"]) == ({"critical": 1}, "Something is wrong")


@pytest.mark.sql
def test_by_severity_the_worst_come_first_then_the_newest(table: Table) -> None:
    for run in ("calm", "bad", "meek", "calm2"):
        table.send(run)
    table.fire("bad", "critical")
    table.fire("meek", "warning")
    assert table.names(sort="severity") == ["bad", "meek", "calm2", "calm"]
    assert table.names(sort="severity", order="asc")[-1] == "bad"
    counts = table.screen()["counts"]["severities"]
    assert counts == {"critical": 1, "warning": 1, "info": 0, "healthy": 2, "unknown": 0}


@pytest.mark.sql
def test_attention_is_an_open_alert_that_nobody_acknowledged(table: Table) -> None:
    for run in ("seen", "unseen", "noted", "over"):
        table.send(run)
    table.fire("seen", "critical", acknowledged=2.0)
    table.fire("unseen", "warning")
    table.fire("noted", "info")
    table.fire("over", "critical", state="resolved", resolved=2.0)
    assert table.names(attention=True) == ["unseen"]
    counts = table.screen(attention=True)["counts"]
    assert (counts["attention"], counts["all"]) == (1, 4), "the counts are what one may choose from"


@pytest.mark.sql
def test_sorted_by_a_metric_or_a_setting_others_come_last(table: Table) -> None:
    for n, (run, loss) in enumerate({"b": 2.0, "a": 1.0, "nan": math.nan}.items()):
        begins = state("starting", time=1.0, step=0, config={"optimizer": {"lr": 10.0**n}})
        table.send(run, {"loss": [loss], "x": [1.0]}, events=[begins])
    table.send("none", {"other": [1.0]})
    assert table.names(sort="loss")[:2] == ["a", "b"]
    assert table.names(sort="loss", order="desc")[:2] == ["b", "a"]
    assert set(table.names(sort="loss")[2:]) == {"nan", "none"}
    found = table.screen(sort="config:optimizer.lr", order="desc", columns="config:optimizer.lr,x")["runs"]
    assert [row["name"] for row in found][:3] == ["nan", "a", "b"]
    assert (found[0]["config"], found[0]["latest"]["x"]) == ({"optimizer.lr": 100.0}, 1.0)


def test_pages_follow_each_other_without_a_gap(table: Table) -> None:
    names, offset, seen = [f"r{n}" for n in range(7)], 0, list[str]()
    for name in names:
        table.send(name)
    while offset is not None:
        found = table.screen(limit=3, offset=offset, sort="name")
        seen += [one["name"] for one in found["runs"]]
        offset = found["next"]
    assert seen == names


@pytest.mark.sql
def test_words_must_all_be_there_and_slashes_are_expressions(table: Table) -> None:
    for run in ("gpt-1", "gpt-2", "bert"):
        table.send(run)
    table.fire("bert", "warning")
    for asked, expected in {
        "gpt": {"gpt-1", "gpt-2"}, "GPT 2": {"gpt-2"}, "wrong": {"bert"}, "/gpt-[2-9]/": {"gpt-2"},
        "/^bert$|gpt-1/": {"bert", "gpt-1"}, "100%": set(),
    }.items():  # fmt: skip
        assert set(table.names(q=asked)) == expected, asked


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"q": "/(/"}, "q is no regular expression"),
        ({"with": "everything"}, "'everything'; allowed are verdict, latest, timing, trend, config"),
        ({"severity": "bad"}, "'bad'; allowed are critical, warning, info, healthy, unknown"),
        ({"state": "asleep"}, "'asleep'; allowed are "),
    ],
)
def test_what_cannot_be_asked_is_told(server: TestClient, asked: dict[str, str], said: str) -> None:
    answer = server.get("/api/v1/runs", params={"with": "latest", **asked}, headers=ADMIN)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (422, True)
