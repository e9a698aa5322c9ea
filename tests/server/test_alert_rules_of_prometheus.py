"""The alert rules in deploy/prometheus are PromQL, and ask for metrics that the server has."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from api_builders import ADMIN, api
from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_is_promql_and_says_what_it_means(rule: dict[str, str]) -> None:
    promql_parser.parse(rule["expr"])
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["annotations"]["summary"].endswith(".")  # type: ignore[index]
    assert rule["labels"]["severity"] in ("warning", "critical")  # type: ignore[index]
    if "for" in rule:
        assert re.fullmatch(r"\d+[smh]", rule["for"])


def test_every_metric_that_a_rule_asks_for_is_there(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        client.get("/api/v1/self")
        text = client.get("/metrics", headers=ADMIN).text
    there = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    asked = {name for rule in RULES for name in re.findall(r"(?:perfagent|process)_\w+", rule["expr"])}
    assert asked - there == set()


def test_the_scrape_job_loads_the_rules_with_a_key(tmp_path: Path) -> None:
    config = yaml.safe_load((FOLDER / "scrape.yml").read_text("utf-8"))
    [job] = config["scrape_configs"]
    assert job["authorization"]["credentials_file"]
    assert job["scheme"] == "https", "the key must not be readable on the way"
    assert config["rule_files"] == ["perfagent-alerts.yml"]
