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

PATH = "/api/v1/rules/alerts"
HIGH = {"metric": "val/acc", "comparison": "<", "threshold": 0.5, "for_steps": 3}


def rows(values: list[float], first: int = 0, **about: Any) -> list[dict[str, Any]]:
    about = {"project": "p", "run": "r", **about}
    return [
        {**about, "step": at, "time": 1000.0 + at, "metrics": {"val/acc": one}} for at, one in enumerate(values, first)
    ]


def log(client: TestClient, *values: float, first: int = 0, **about: Any) -> str:
    assert client.post("/api/v1/log", json=rows([*values], first, **about)).status_code == 200
    name = about.get("run", "r")
    return str(client.get("/api/v1/runs", params={"name": name}).json()["runs"][0]["run"])


def ask(client: TestClient, method: str, path: str = "", body: Any = None, project: str = "") -> dict[str, Any]:
    answer = client.request(method, PATH + path, json=body, params={"project": project}, headers=ADMIN)
    return {"status": answer.status_code, **(answer.json() if answer.content else {})}


def alerts(client: TestClient, run: str) -> list[tuple[str, str]]:
    return [(one["rule"], one["state"]) for one in client.get(f"/api/v1/runs/{run}/alerts").json()["alerts"]]


def test_it_counts_at_once_is_changed_and_is_taken_back(client: TestClient) -> None:
    run = log(client, 0.9, 0.1)
    assert ask(client, "POST", body=HIGH | {"name": "low"})["rule"] == "own:low"
    assert ask(client, "POST", body=HIGH | {"name": "low"})["status"] == 409
    log(client, 0.1, 0.1, 0.1, first=2)
    until(lambda: alerts(client, run) == [("own:low", "firing")])
    verdict = client.get(f"/api/v1/runs/{run}/verdict", headers={"Accept-Language": "zh"}).json()
    assert verdict["title"] == "val/acc < 0.5，持续 3 步"
    assert ask(client, "PUT", "/low", HIGH | {"threshold": 0.05})["status"] == 200
    until(lambda: alerts(client, run) == [("own:low", "resolved")])
    muted = client.patch(f"/api/v1/runs/{run}", json={"rules_off": ["own:low"]}, headers=ADMIN)
    assert muted.json()["rules_off"] == ["own:low"]
    silence = {"rule": "own:low", "for_s": 60}
    assert client.post("/api/v1/silences", json=silence, headers=ADMIN).status_code == 201
    assert [ask(client, "DELETE", "/low")["status"] for _ in range(2)] == [204, 404]
    logged = client.get("/api/v1/audit", headers=ADMIN).json()["entries"]
    made = next(one for one in logged if one["action"] == "own_alert.create")
    assert (made["thing"], "comparison <, threshold 0.5" in made["detail"]) == ("low", True)


def test_only_runs_of_its_project_with_its_tags_are_judged(client: TestClient) -> None:
    assert ask(client, "POST", body=HIGH | {"name": "low", "tags": ["big"]}, project="p")["project"] == "p"
    runs = {name: log(client, 0.9, run=name, project=project) for name, project in (("a", "p"), ("b", "p"), ("c", "q"))}
    for name in ("a", "c"):
        client.patch(f"/api/v1/runs/{runs[name]}", json={"tags": ["big", "x"]}, headers=ADMIN)
    for name, project in (("a", "p"), ("b", "p"), ("c", "q")):
        log(client, 0.1, 0.1, 0.1, first=1, run=name, project=project)
    until(lambda: alerts(client, runs["a"]))
    until(lambda: services_of(client).engine.counters["lag_frames"] == 0)
    assert alerts(client, runs["b"]) == alerts(client, runs["c"]) == []
    assert len(ask(client, "GET", project="p")["alerts"]) == 1
    assert (ask(client, "GET", project="q")["alerts"], len(ask(client, "GET")["alerts"])) == ([], 1)


def test_a_try_says_when_it_would_have_fired_and_saves_nothing(client: TestClient) -> None:
    run = log(client, *[0.9] * 5, *[0.1] * 5, *[0.9] * 400, *[0.2] * 5)
    found = ask(client, "POST", "/try", HIGH | {"run": run})
    assert [(one["since_step"], one["step"], one["until_step"], one["value"]) for one in found["fired"]] == [
        (5, 7, 9, 0.1), (410, 412, 414, 0.2)
    ]  # fmt: skip
    assert (found["count"], found["series"], found["samples"], found["left_out"]) == (2, ["val/acc"], 415, 0)
    assert ask(client, "POST", "/try", HIGH | {"run": run, "metric": "x*"})["series"] == []
    assert ask(client, "POST", "/try", HIGH | {"run": "nope"})["status"] == 404
    assert ask(client, "GET")["alerts"] == []


def test_a_hundred_are_enough_and_broken_rows_are_left_out(client: TestClient) -> None:
    for at in range(100):
        assert ask(client, "PUT", f"/a{at}", HIGH)["status"] == 200
    refused = ask(client, "POST", body=HIGH | {"name": "more"})
    assert (refused["status"], refused["error"]["code"]) == (409, "too_many")
    assert ask(client, "POST", body=HIGH | {"name": "more"}, project="p")["status"] == 201
    wrong = ask(client, "POST", body=HIGH | {"name": "x", "threshold": None})
    assert (wrong["status"], wrong["error"]["field"]) == (422, "threshold")
    services = services_of(client)
    services.database.write(lambda connection: connection.execute(table.update().values(form='{"metric": 1}')))
    services.rules_changed()
    assert ask(client, "GET", project="p")["alerts"] == []
    ignored = client.get("/api/v1/rules").json()["ignored"]
    assert (len(ignored), "an alert needs a name" in ignored[0]["why"]) == (100, True)


def test_those_of_the_file_judge_and_no_api_changes_them(tmp_path: Path) -> None:
    data = tmp_path / "server-data"
    data.mkdir()
    lines = '[[alerts]]\nname = "low"\nmetric = "val/acc"\ncomparison = "<"\nthreshold = 0.5\nfor_steps = 3\n'
    (data / RULES_FILE).write_text(lines, "utf-8")
    with api(tmp_path) as client:
        [shown] = ask(client, "GET")["alerts"]
        assert (shown["from_file"], shown["title"]) == (True, "val/acc < 0.5 for 3 steps")
        named = HIGH | {"name": "low"}
        for refused in (
            ask(client, "POST", "", named),
            ask(client, "PUT", "/low", HIGH),
            ask(client, "DELETE", "/low"),
        ):
            assert (refused["status"], "stands in rules.toml" in refused["error"]["message"]) == (409, True)
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
        added = perfagent(tmp_path, "alerts", "add", "low", *words, **where)
        assert added.stdout == "own:low: val/acc < 0.5 for 3 steps\n"
        assert "low" in perfagent(tmp_path, "alerts", "rules", **where).stdout
        server.admin("POST", "/log", rows([0.1, 0.1, 0.1], 5))
        until(lambda: receiver.of_type("alert.firing"))
        [got] = receiver.of_type("alert.firing")
        Webhook(secret).verify(got.body, got.headers)
        told = got.json["data"]["alert"]["message"]
        assert told == "val/acc is 0.1: < 0.5 since step 5, for 3 steps and more. Ask Ann."
        assert perfagent(tmp_path, "alerts", "remove", "low", **where).stdout == "low is removed\n"
