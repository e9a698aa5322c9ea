"""Other thresholds, for all projects, for one, or for a run: by rules.toml and by the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, services_of
from builders import until
from fastapi.testclient import TestClient

from perfagent.errors import ConfigError
from perfagent.wire import MAX_NAME_BYTES
from perfagent_server.engine.rule_settings import RULES_FILE
from perfagent_server.engine.rules_file import read_rules_file
from perfagent_server.rules.catalogue import rules_for


def _file(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / RULES_FILE
    path.write_text(text, "utf-8")
    return path


def test_a_file_sets_thresholds_for_all_projects_and_for_one(tmp_path: Path) -> None:
    file = _file(tmp_path, "[loss_spike]\nrise_pct = 8\n\n[projects.research.data_bound]\nenabled = false\n")
    found = read_rules_file(file)
    everywhere = {rule.id: rule for rule in rules_for(found[""])}
    assert everywhere["loss_spike"].thresholds()["rise_pct"] == 8.0
    assert "data_bound" in everywhere
    assert "data_bound" not in {rule.id for rule in rules_for(found[""], found["research"])}
    assert read_rules_file(tmp_path / "nothing.toml") == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[loss_spikes]\nrise_pct = 8", "there is no rule 'loss_spikes'; there are oom_observed, "),
        ("[loss_spike]\nrise = 8", "loss_spike has no threshold 'rise'; it has short, long, "),
        ("[loss_spike]\nshort = 8.5", "loss_spike.short must be a whole number, not 8.5"),
        ('[loss_spike]\nrise_pct = "8"', "loss_spike.rise_pct must be a number, not '8'"),
        ("[init_slow]\nfor_s = nan", "init_slow.for_s must be above 0 and up to 1.2e+06, not nan"),
        ("[loss_spike]\nshort = nan", "loss_spike.short must be from 1 to 100, not nan"),
        ("[data_bound]\nsteps = 65", "data_bound.steps must be from 2 to 64, not 65"),
        ("[data_bound]\nskip_steps = -1", "data_bound.skip_steps must be from 0 to 5,000, not -1"),
        ("[data_bound]\nwarning_pct = 101", "data_bound.warning_pct must be above 0 and up to 100, not 101"),
        ("[data_bound]\nprofile = 1", "data_bound.profile must be true or false, not 1"),
        ("[oom_observed]\nprofile = true", "oom_observed.profile cannot be true"),
        ("[projects.a.hang]\nprofile = true", "it does for straggler, stage_imbalance, data_bound, "),
        ("[loss_spike]\nenabled = 1", "loss_spike.enabled must be true or false, not 1"),
        ("loss_spike = 8", "loss_spike must be a table of settings, not 8"),
        ("projects = 8", "`projects` must be tables of rules"),
        ("[loss_spike", "is no TOML"),
        ("alerts = 1", "`alerts` must be a list of tables"),
        ("[[alerts]]\nx = 1", "alerts, the one with number 1: an alert has no 'x'; it has name, metric, "),
        (2 * '[[alerts]]\nname = "a"\nmetric = "b"\nfunction = "fall"\nfor_s = 5\n', "there are two alerts 'a'"),
    ],
)
def test_unknown_setting_is_refused_with_those_there_are(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"rules\.toml") as refused:
        read_rules_file(_file(tmp_path, text))
    assert says in str(refused.value)


def _log(client: TestClient, project: str, run: str, values: list[float | str]) -> str:
    """Logs losses of a run; the run's id."""
    rows = [{"project": project, "run": run, "step": at, "metrics": {"loss": loss}} for at, loss in enumerate(values)]
    assert client.post("/api/v1/log", json=rows).status_code == 200
    [found] = client.get("/api/v1/runs", params={"project": project, "name": run}).json()["runs"]
    return str(found["run"])


def _put(client: TestClient, rule: str, project: str = "", **body: Any) -> dict[str, Any]:
    answer = client.put(f"/api/v1/rules/{rule}", params={"project": project}, json=body, headers=ADMIN)
    return {"status": answer.status_code, **answer.json()}


def test_profiles_are_off_until_a_file_or_the_api_sets_them_on(tmp_path: Path) -> None:
    _file(
        tmp_path / "server-data",
        "[data_bound]\nprofile = true\n\n[projects.calm.data_bound]\nprofile = false\n[hang]\nprofile = false\n",
    )
    with api(tmp_path) as client:

        def on(project: str = "") -> list[str]:
            rules = client.get("/api/v1/rules", params={"project": project}).json()["rules"]
            known = services_of(client).rule_settings
            assert all(rule["profile"] == known.takes_profile(project, rule["rule"]) for rule in rules)
            return [rule["rule"] for rule in rules if rule["profile_helps"] and rule["profile"]]

        assert (on(), on("calm")) == (["data_bound"], [])
        assert _put(client, "straggler", "calm", profile=True)["profile"]
        kept = _put(client, "data_bound", "calm", thresholds={"warning_pct": 15.0})
        assert kept["profile"] is False, "the file's word stays"
        assert _put(client, "data_bound", "calm", profile=True)["profile"]
        assert (on(), on("calm")) == (["data_bound"], ["straggler", "data_bound"])
        refused = _put(client, "process_crash", "calm", profile=True)
        assert (refused["status"], refused["error"]["field"]) == (422, "profile")
        assert "it does for straggler, " in refused["error"]["message"]
        gone = client.delete("/api/v1/rules/data_bound", params={"project": "calm"}, headers=ADMIN)
        assert gone.json()["profile"] is False


def test_a_rule_that_is_off_for_a_project_judges_no_run_of_it(client: TestClient) -> None:
    assert _put(client, "nonfinite_loss", "a", enabled=False)["enabled"] is False
    mine, other = _log(client, "a", "mine", [1.0, "NaN"]), _log(client, "b", "other", [1.0, "NaN"])

    def alerts(run: str) -> list[Any]:
        return list(client.get(f"/api/v1/runs/{run}/alerts").json()["alerts"])

    until(lambda: alerts(other))
    assert alerts(mine) == []
    assert client.delete("/api/v1/rules/nonfinite_loss", params={"project": "a"}, headers=ADMIN).json()["enabled"]
    again = _log(client, "a", "again", [1.0, "NaN"])
    until(lambda: alerts(again))


def test_rule_switched_off_for_a_run_resolves_its_findings(client: TestClient) -> None:
    run = _log(client, "p", "sick", [1.0, "NaN"])
    until(lambda: client.get(f"/api/v1/runs/{run}/verdict").json()["rule"] == "nonfinite_loss")
    answer = client.patch(f"/api/v1/runs/{run}", json={"rules_off": ["nonfinite_loss"]})
    assert answer.json()["rules_off"] == ["nonfinite_loss"]
    [alert] = client.get(f"/api/v1/runs/{run}/alerts").json()["alerts"]
    assert (alert["state"], alert["evidence"]["resolved"]) == ("resolved", "the rule was switched off")
    _log(client, "p", "sick", [1.0, "NaN", "NaN"])
    assert len(client.get(f"/api/v1/runs/{run}/alerts").json()["alerts"]) == 1
    assert client.patch(f"/api/v1/runs/{run}", json={"rules_off": ["x"]}).status_code == 422


def test_a_threshold_of_a_project_is_shown_there_alone(client: TestClient) -> None:
    """Also of one with the longest name: PostgreSQL refuses a text that is longer than its column; SQLite accepts it."""
    long = "p" * MAX_NAME_BYTES
    for project in ("a", long):
        assert _put(client, "nonfinite_loss", project, thresholds={"excused_steps": 5})["status"] == 200

    def shown(project: str) -> int:
        rules = client.get("/api/v1/rules", params={"project": project}).json()["rules"]
        return int(next(rule["thresholds"]["excused_steps"] for rule in rules if rule["rule"] == "nonfinite_loss"))

    assert [shown(project) for project in ("a", long, "b", "")] == [5, 5, 2, 2]


def test_rules_take_their_own_thresholds_and_none_without_sense(client: TestClient) -> None:
    for rule in client.get("/api/v1/rules").json()["rules"]:
        same = _put(client, rule["rule"], thresholds=rule["defaults"])
        assert (same["status"], same["thresholds"]) == (200, rule["defaults"])
        for name in rule["thresholds"]:
            for value in ("NaN", "-Infinity", -1, 1e300):
                answer = _put(client, rule["rule"], thresholds={name: value})
                assert answer["status"] == 422
                assert f"{rule['rule']}.{name} must be " in answer["error"]["message"]


@pytest.mark.parametrize(
    ("rule", "body", "status", "says"),
    [
        ("nothing", {}, 404, "there is no rule 'nothing'; there are oom_observed"),
        ("loss_spike", {"thresholds": {"rise": 1.0}}, 422, "loss_spike has no threshold 'rise'"),
        ("loss_spike", {"thresholds": {"short": 1.5}}, 422, "must be a whole number"),
        ("loss_spike", {"threshold": {}}, 422, "threshold"),
    ],
)
def test_what_is_no_rule_or_threshold_is_refused(
    client: TestClient, rule: str, body: dict[str, Any], status: int, says: str
) -> None:
    answer = _put(client, rule, **body)
    assert (answer["status"], says in answer["error"]["message"]) == (status, True)
