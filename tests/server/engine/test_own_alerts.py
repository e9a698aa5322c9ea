"""Alerts that users make themselves: by file, API and command, tried on a run, and in runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, services_of
from builders import Receiver, server_process, until
from commands import perfagent
from fastapi.testclient import TestClient
from standardwebhooks import Webhook

from perfagent_server.engine.rule_settings import RULES_FILE
from perfagent_server.store.tables import own_alert as table

LOW = {"metric": "val/acc", "comparison": "<", "threshold": 0.5, "for_steps": 3}


def rows(values: list[float], first: int = 0, run: str = "r", project: str = "p") -> list[dict[str, Any]]:
    about, steps = {"project": project, "run": run}, enumerate(values, first)
    return [about | {"step": at, "time": 1000.0 + at, "metrics": {"val/acc": value}} for at, value in steps]


def log(client: TestClient, *values: float, first: int = 0, **about: str) -> str:
    return str(client.post("/api/v1/log", json=rows([*values], first, **about)).json()["run"])


def ask(client: TestClient, method: str, path: str = "", body: Any = None, project: str = "") -> dict[str, Any]:
    path = f"/api/v1/rules/alerts{path}"
    answer = client.request(method, path, json=body, params={"project": project}, headers=ADMIN)
    return {"status": answer.status_code, **(answer.json() if answer.content else {})}


def alerts(client: TestClient, run: str) -> list[tuple[str, str]]:
    return [(one["rule"], one["state"]) for one in client.get(f"/api/v1/runs/{run}/alerts").json()["alerts"]]


def test_it_counts_at_once_is_changed_and_is_taken_back(client: TestClient) -> None:
    run, named = log(client, 0.9, 0.1), LOW | {"name": "low"}
    assert ask(client, "POST", body=named)["rule"] == "own:low"
    assert ask(client, "POST", body=named)["status"] == 409
    log(client, 0.1, 0.1, 0.1, first=2)
    until(lambda: alerts(client, run) == [("own:low", "firing")])
    verdict = client.get(f"/api/v1/runs/{run}/verdict", headers={"Accept-Language": "zh"}).json()
    assert verdict["title"] == "val/acc < 0.5，持续 3 步"
    assert ask(client, "PUT", "/low", LOW | {"threshold": 0.05})["status"] == 200
    until(lambda: alerts(client, run) == [("own:low", "resolved")])
    assert client.patch(f"/api/v1/runs/{run}", json={"rules_off": ["own:low"]}, headers=ADMIN).status_code == 200
    assert client.post("/api/v1/silences", json={"rule": "own:low", "for_s": 60}, headers=ADMIN).status_code == 201
    assert [ask(client, "DELETE", "/low")["status"] for _ in range(2)] == [204, 404]
    logged = client.get("/api/v1/audit", headers=ADMIN).json()["entries"]
    assert [one["action"] for one in logged if one["thing"] == "low"][-2:] == ["own_alert.change", "own_alert.create"]


def test_only_runs_of_its_project_with_its_tags_are_judged(client: TestClient) -> None:
    assert ask(client, "POST", body=LOW | {"name": "low", "tags": ["big"]}, project="p")["project"] == "p"
    where = {"a": "q", "b": "p", "c": "p"}
    runs = {name: log(client, 0.9, run=name, project=project) for name, project in where.items()}
    for name in ("a", "c"):
        client.patch(f"/api/v1/runs/{runs[name]}", json={"tags": ["big", "x"]}, headers=ADMIN)
    for name, project in where.items():  # judged in this order
        log(client, 0.1, 0.1, 0.1, first=1, run=name, project=project)
    until(lambda: alerts(client, runs["c"]))
    assert alerts(client, runs["a"]) == alerts(client, runs["b"]) == []
    assert [len(ask(client, "GET", project=project)["alerts"]) for project in ("", "p", "q")] == [1, 1, 0]


def test_a_try_says_when_it_would_have_fired_and_saves_nothing(client: TestClient) -> None:
    run = log(client, *[0.9] * 5, *[0.1] * 5, *[0.9] * 400, *[0.2] * 5)
    found = ask(client, "POST", "/try", LOW | {"run": run})
    fired = [(one["since_step"], one["step"], one["until_step"], one["value"]) for one in found["fired"]]
    assert fired == [(5, 7, 9, 0.1), (410, 412, 414, 0.2)]
    assert (found["count"], found["series"], found["samples"], found["left_out"]) == (2, ["val/acc"], 415, 0)
    assert ask(client, "POST", "/try", LOW | {"run": run, "metric": "x*"})["series"] == []
    assert (ask(client, "POST", "/try", LOW | {"run": "nope"})["status"], ask(client, "GET")["alerts"]) == (404, [])


def test_a_hundred_are_enough_and_broken_rows_are_left_out(client: TestClient) -> None:
    assert {ask(client, "PUT", f"/a{at}", LOW)["status"] for at in range(100)} == {200}
    refused = ask(client, "POST", body=LOW | {"name": "more"})
    assert (refused["status"], refused["error"]["code"]) == (409, "too_many")
    wrong = ask(client, "POST", body=LOW | {"name": "more", "threshold": None}, project="p")
    assert (wrong["status"], wrong["error"]["field"]) == (422, "threshold")
    services = services_of(client)
    services.database.write(lambda connection: connection.execute(table.update().values(form='{"metric": 1}')))
    services.rules_changed()
    ignored = client.get("/api/v1/rules").json()["ignored"]
    assert (len(ignored), "an alert needs a name" in ignored[0]["why"]) == (100, True)


def test_those_of_the_file_judge_and_no_api_changes_them(tmp_path: Path) -> None:
    (data := tmp_path / "server-data").mkdir()
    lines = '[[alerts]]\nname = "low"\nmetric = "val/acc"\ncomparison = "<"\nthreshold = 0.5\nfor_steps = 3\n'
    (data / RULES_FILE).write_text(lines, "utf-8")
    with api(tmp_path) as client:
        [shown] = ask(client, "GET")["alerts"]
        assert (shown["from_file"], shown["title"]) == (True, "val/acc < 0.5 for 3 steps")
        refused = [ask(client, "PUT", "/low", LOW), ask(client, "DELETE", "/low")]
        assert ["stands in rules.toml" in one["error"]["message"] for one in refused] == [True, True]
        run = log(client, 0.1, 0.1, 0.1)
        until(lambda: alerts(client, run) == [("own:low", "firing")])


@pytest.mark.real
def test_one_made_by_command_fires_and_arrives_signed(tmp_path: Path, receiver: Receiver) -> None:
    with server_process(tmp_path / "server", PERFAGENT_WEBHOOK_ALLOW=receiver.address) as server:
        secret = server.admin("POST", "/channels", {"kind": "webhook", "url": receiver.url})["secret"]
        words = ["--metric", "val/acc", "--below", "0.5", "--for", "3", "--note", "Ask Ann."]
        where = {"PERFAGENT_SERVER": server.url, "PERFAGENT_ADMIN_TOKEN": server.admin_token}
        server.admin("POST", "/log", rows([0.9, 0.1, 0.1, 0.1, 0.9]))
        run = server.get("/runs")["runs"][0]["run"]
        until(lambda: server.get("/self")["counters"]["rules"]["frames"])
        tried = perfagent(tmp_path, "alerts", "add", "low", *words, "--try", run, **where)
        assert "would have fired once in 5 samples of 1 series" in tried.stdout
        assert "val/acc < 0.5 for 3 steps" in perfagent(tmp_path, "alerts", "add", "low", *words, **where).stdout
        server.admin("POST", "/log", rows([0.1, 0.1, 0.1], 5))
        until(lambda: receiver.of_type("alert.firing"))
        [got] = receiver.of_type("alert.firing")
        Webhook(secret).verify(got.body, got.headers)
        assert got.json["data"]["alert"]["message"].startswith("val/acc is 0.1: < 0.5 since step 5, for 3 steps")
        assert perfagent(tmp_path, "alerts", "remove", "low", **where).stdout == "low is removed\n"
