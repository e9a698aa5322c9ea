"""Other thresholds, for all projects, for one, or for a run: by rules.toml and by the API."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import until
from data_folder import place_of
from fastapi.testclient import TestClient
from httpx import Response

from perfagent.errors import ConfigError
from perfagent.wire import MAX_NAME_BYTES
from perfagent_server.app import create_app
from perfagent_server.engine.rule_settings import read_rules_file
from perfagent_server.rules.catalogue import all_rules, rules_for
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.rule import Rule
from perfagent_server.settings import Settings


def _file(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
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
    ],
)
def test_a_setting_that_there_is_not_is_refused_with_what_there_is(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"rules\.toml") as refused:
        read_rules_file(_file(tmp_path, text))
    assert says in str(refused.value)


def test_a_rule_that_is_defined_elsewhere_judges_no_run_by_itself() -> None:
    class Foreign(Rule):
        id = "foreign"

    all_rules.cache_clear()
    assert "foreign" not in {rule.id for rule in all_rules()}


def test_two_rules_that_put_ranks_together_differently_are_a_mistake_in_the_rules() -> None:
    Plan(all_rules())  # these do not


def thresholds(fires: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(fires) if name}


def test_every_rule_is_written_with_the_same_causes_in_both_languages() -> None:
    for rule in all_rules():
        assert rule.english.remedies.keys() == rule.chinese.remedies.keys()
        assert thresholds(rule.english.fires) == thresholds(rule.chinese.fires)
        for words in (rule.english, rule.chinese):
            assert words.name
            assert words.meaning
            assert words.fires.format(**rule.thresholds())
            assert "" in words.remedies
    assert len({rule.place for rule in all_rules()}) == len(all_rules()), "two rules have one place among verdicts"


TOKEN = "t" * 32
ADMIN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(**place_of(tmp_path), admin_token=TOKEN)
    with TestClient(create_app(settings, dashboard=False), base_url="http://127.0.0.1:8420") as client:
        yield client


def _log(api: TestClient, project: str, run: str, values: list[float | str]) -> str:
    """Logs losses of a run; the run's id."""
    rows = [
        {"project": project, "run": run, "step": step, "metrics": {"loss": value}} for step, value in enumerate(values)
    ]
    assert api.post("/api/v1/log", json=rows).status_code == 200
    [found] = api.get("/api/v1/runs", params={"project": project, "name": run}).json()["runs"]
    return str(found["run"])


def _verdict(api: TestClient, run: str) -> str:
    return str(api.get(f"/api/v1/runs/{run}/verdict").json()["rule"])


def test_profiles_are_off_until_a_file_or_the_api_switches_them_on_for_a_rule_of_a_project(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    data = place["data"]
    _file(
        data, "[data_bound]\nprofile = true\n\n[projects.calm.data_bound]\nprofile = false\n[hang]\nprofile = false\n"
    )
    settings = Settings(**place, admin_token=TOKEN)
    with TestClient(create_app(settings, dashboard=False), base_url="http://127.0.0.1:8420") as api:

        def shown(project: str = "") -> dict[str, bool]:
            rules = api.get("/api/v1/rules", params={"project": project}).json()["rules"]
            known = api.app.state.services.rule_settings  # type: ignore[attr-defined]
            assert all(rule["profile"] == known.takes_profile(project, rule["rule"]) for rule in rules)
            return {rule["rule"]: rule["profile"] for rule in rules if rule["profile_helps"]}

        def put(rule: str, **body: object) -> Response:
            return api.put(f"/api/v1/rules/{rule}", params={"project": "calm"}, json=body, headers=ADMIN)

        assert [rule for rule, profile in shown().items() if profile] == ["data_bound"]
        assert not any(shown("calm").values())
        assert put("straggler", profile=True).json()["profile"]
        assert put("data_bound", thresholds={"warning_pct": 15.0}).json()["profile"] is False, "the file's word stays"
        assert put("data_bound", profile=True).json()["profile"]
        assert [rule for rule, profile in shown("calm").items() if profile] == ["straggler", "data_bound"]
        assert [rule for rule, profile in shown().items() if profile] == ["data_bound"]
        refused = put("process_crash", profile=True)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "profile")
        assert "it does for straggler, " in refused.json()["error"]["message"]
        assert (
            api.delete("/api/v1/rules/data_bound", params={"project": "calm"}, headers=ADMIN).json()["profile"] is False
        )


def test_a_rule_that_is_off_for_a_project_judges_no_run_of_it_and_those_of_others(api: TestClient) -> None:
    answer = api.put("/api/v1/rules/nonfinite_loss", params={"project": "a"}, json={"enabled": False}, headers=ADMIN)
    assert answer.status_code == 200
    assert not answer.json()["enabled"]
    mine, other = _log(api, "a", "mine", [1.0, "NaN"]), _log(api, "b", "other", [1.0, "NaN"])
    until(lambda: api.get(f"/api/v1/runs/{other}/alerts").json()["alerts"])
    assert api.get(f"/api/v1/runs/{mine}/alerts").json()["alerts"] == []
    assert api.delete("/api/v1/rules/nonfinite_loss", params={"project": "a"}, headers=ADMIN).json()["enabled"]
    _log(api, "a", "again", [1.0, "NaN"])
    until(
        lambda: (
            _verdict(api, api.get("/api/v1/runs", params={"name": "again"}).json()["runs"][0]["run"])
            == "nonfinite_loss"
        )
    )


def test_a_rule_that_is_switched_off_for_a_run_resolves_what_it_had_found(api: TestClient) -> None:
    run = _log(api, "p", "sick", [1.0, "NaN"])
    until(lambda: _verdict(api, run) == "nonfinite_loss")
    answer = api.patch(f"/api/v1/runs/{run}", json={"rules_off": ["nonfinite_loss"]})
    assert answer.json()["rules_off"] == ["nonfinite_loss"]
    [alert] = api.get(f"/api/v1/runs/{run}/alerts").json()["alerts"]
    assert (alert["state"], alert["evidence"]["resolved"]) == ("resolved", "the rule was switched off")
    _log(api, "p", "sick", [1.0, "NaN", "NaN"])
    assert len(api.get(f"/api/v1/runs/{run}/alerts").json()["alerts"]) == 1


def test_a_threshold_of_a_project_is_shown_and_counts(api: TestClient) -> None:
    change = {"thresholds": {"excused_steps": 5}}
    assert (
        api.put("/api/v1/rules/nonfinite_loss", params={"project": "a"}, json=change, headers=ADMIN).status_code == 200
    )

    def shown(project: str) -> int:
        rules = api.get("/api/v1/rules", params={"project": project}).json()["rules"]
        return int(next(rule["thresholds"]["excused_steps"] for rule in rules if rule["rule"] == "nonfinite_loss"))

    assert (shown("a"), shown("b"), shown("")) == (5, 2, 2)


def test_a_project_with_the_longest_name_may_have_its_own_threshold(api: TestClient) -> None:
    """PostgreSQL refuses a text that is longer than its column; SQLite accepts it."""
    change = {"thresholds": {"excused_steps": 5}}
    asked = {"project": "p" * MAX_NAME_BYTES}
    assert api.put("/api/v1/rules/nonfinite_loss", params=asked, json=change, headers=ADMIN).status_code == 200


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", -1, 1e300])
def test_a_threshold_without_sense_is_refused_for_every_rule(api: TestClient, value: object) -> None:
    for rule in api.get("/api/v1/rules").json()["rules"]:
        for name in rule["thresholds"]:
            answer = api.put(f"/api/v1/rules/{rule['rule']}", json={"thresholds": {name: value}}, headers=ADMIN)
            assert answer.status_code == 422
            assert f"{rule['rule']}.{name} must be " in answer.json()["error"]["message"]


def test_what_a_rule_has_by_itself_may_be_set(api: TestClient) -> None:
    for rule in api.get("/api/v1/rules").json()["rules"]:
        same = {"thresholds": rule["defaults"]}
        answer = api.put(f"/api/v1/rules/{rule['rule']}", json=same, headers=ADMIN)
        assert (answer.status_code, answer.json()["thresholds"]) == (200, rule["defaults"])


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("nothing", {}, 404, "there is no rule 'nothing'; there are oom_observed"),
        ("loss_spike", {"thresholds": {"rise": 1.0}}, 422, "loss_spike has no threshold 'rise'"),
        ("loss_spike", {"thresholds": {"short": 1.5}}, 422, "must be a whole number"),
        ("loss_spike", {"threshold": {}}, 422, "threshold"),
    ],
)
def test_what_is_no_rule_or_threshold_is_refused(
    api: TestClient, path: str, body: dict[str, object], status: int, says: str
) -> None:
    answer = api.put(f"/api/v1/rules/{path}", json=body, headers=ADMIN)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert api.patch(f"/api/v1/runs/{_log(api, 'p', 'r', [1.0])}", json={"rules_off": ["x"]}).status_code == 422
