"""The dashboard in deploy/grafana is PromQL of metrics that the server has, and is found by its provisioning."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from api_builders import ADMIN, api, frame, send
from builders import until
from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
BOARD: dict[str, Any] = json.loads((FOLDER / "runs.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = BOARD["panels"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize("expression", [one for _, one in EXPRESSIONS], ids=[title for title, _ in EXPRESSIONS])
def test_a_panel_asks_in_promql(expression: str) -> None:
    promql_parser.parse(expression)


def test_every_metric_of_the_dashboard_is_there(tmp_path: Path) -> None:
    said = {
        "loss": 0.5,
        "step_time_s": 0.25,
        "gpu/utilization_pct": 80.0,
        "gpu/memory_used_bytes": 1e9,
        "process/rss_bytes": 1e9,
    }
    with api(tmp_path) as client:
        for run, throughput in (("r1", "tokens_per_s"), ("r2", "samples_per_s")):
            metrics = {name: [value] for name, value in (said | {throughput: 9.0}).items()}
            send(client, frame(metrics, run=run), **ADMIN)

        def names() -> set[str]:
            text = client.get("/metrics", headers=ADMIN).text
            return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}

        asked = {name for _, one in EXPRESSIONS for name in re.findall(r"perfagent_\w+", one)}
        asked |= {
            name for one in BOARD["templating"]["list"] for name in re.findall(r"perfagent_\w+", str(one["query"]))
        }
        until(lambda: asked <= names(), why="a metric of the dashboard is not in /metrics")
        shown = {name for name in names() if name.startswith("perfagent_run_")}
        assert shown - asked == set(), "what /metrics has of runs has a panel"


def test_panels_do_not_overlap_and_have_one_source() -> None:
    places = [
        {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        for at in (panel["gridPos"] for panel in PANELS)
    ]
    assert sum(map(len, places)) == len(set().union(*places))
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${source}"}
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_the_provisioning_names_the_dashboards_source() -> None:
    def read(name: str) -> Any:
        return yaml.safe_load((FOLDER / "provisioning" / name).read_text("utf-8"))

    [source] = read("datasources/prometheus.yml")["datasources"]
    [variable] = [one for one in BOARD["templating"]["list"] if one["type"] == "datasource"]
    assert (source["uid"], source["type"]) == (variable["current"]["value"], variable["query"])
    [provider] = read("dashboards/perfagent.yml")["providers"]
    assert provider["type"] == "file" and provider["options"]["path"]
