"""What Prometheus reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_builders import ADMIN, api, frame, send
from builders import until
from fastapi.testclient import TestClient
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families


def scrape(client: TestClient) -> dict[str, Metric]:
    answer = client.get("/metrics", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float | None:
    """Of the one sample perfagent_SAMPLE with at least these labels."""
    samples = [one for family in families.values() for one in family.samples]
    named = (sample, f"perfagent_{sample}")
    found = [one.value for one in samples if one.name in named and labels.items() <= one.labels.items()]
    assert len(found) <= 1, found
    return found[0] if found else None


def test_requests_and_what_ingest_does_are_counted(client: TestClient, tmp_path: Path) -> None:
    sent = frame({"loss": [1.0, 2.0]}, run="r1")
    send(client, sent, **ADMIN)
    send(client, sent, **ADMIN)
    for path in (*(f"/api/v1/runs/r{number}" for number in (1, 2, 3)), "/api/v1/else/where", "/.env"):
        client.get(path)
    families = scrape(client)
    of_a_run = {"route": "/api/v1/runs/{run}", "method": "GET"}
    assert [value(families, "http_requests_total", status=status, **of_a_run) for status in ("200", "404")] == [1, 2]
    assert value(families, "http_request_duration_seconds_count", **of_a_run) == 3
    routes = {one.labels["route"] for one in families["perfagent_http_requests"].samples}
    assert not [route for route in routes if "r1" in route or "where" in route or "env" in route], routes
    for outcome in ("stored", "duplicate"):
        assert value(families, "ingest_samples_total", outcome=outcome) == 2
    assert (value(families, "ingest_ack_seconds_count"), value(families, "tail_rows")) == (2, 1)
    for sample in (
        "ingest_received_bytes_total", "database_commit_seconds_count", "database_size_bytes", "process_resident_memory_bytes",
    ):  # fmt: skip
        assert (value(families, sample) or 0) > 0, sample
    with api(tmp_path / "other") as other:  # two apps in one process count for themselves
        counted = [value(scrape(one), "ingest_frames_total") for one in (client, other)]
    assert counted == [2, 0]


def test_every_counter_is_there_and_named_as_prometheus_wishes(client: TestClient) -> None:
    families = scrape(client)
    counted = client.get("/api/v1/self").json()["counters"]
    unnamed = [name for name, family in families.items() if family.type == "unknown"]
    assert unnamed == [], "name them in monitoring/counters.py"
    assert sum(map(len, counted.values())) <= sum(len(family.samples) for family in families.values())
    for name, family in families.items():
        assert family.documentation, name
        assert family.type != "counter" or all(one.name.endswith("_total") for one in family.samples), name
        assert not name.endswith(("_s", "_ms", "_pct", "_total_total")), name


def test_runs_that_go_on_are_there_and_ended_ones_are_not(client: TestClient) -> None:
    metrics = {"loss": [0.5], "step_time_s": [0.25], "tokens_per_s": [1000.0], "gpu/utilization_pct": [80.0]}
    send(client, frame(metrics, run="r1"), **ADMIN)
    client.post("/api/v1/log", json={"run": "over", "metrics": {"loss": 1.0}, "state": "finished"}, headers=ADMIN)
    until(lambda: value(scrape(client), "run_loss", run="r1") is not None)
    families = scrape(client)
    assert value(families, "run_loss", run="r1", project="p") == 0.5
    assert value(families, "run_gpu_utilization_ratio", run="r1") == pytest.approx(0.8)
    assert value(families, "run_state", run="r1", state="running") == 1
    assert (value(families, "run_last_contact_timestamp_seconds", run="r1") or 0) > 1e9
    assert "over" not in {one.labels["name"] for one in families["perfagent_run_loss"].samples}


def test_the_number_of_runs_is_bounded(tmp_path: Path) -> None:
    with api(tmp_path, metrics_runs=2) as client:
        for number in range(3):
            send(client, frame({"loss": [1.0]}, run=f"r{number}"), **ADMIN)
        families = scrape(client)
        assert (len(families["perfagent_run_step"].samples), value(families, "runs_not_shown")) == (2, 1)


def test_it_needs_a_read_key_and_speaks_openmetrics(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        assert client.get("/metrics").status_code == 401
        made = client.post("/api/v1/keys", json={"scope": "read"}, headers=ADMIN).json()
        key = {"Authorization": f"Bearer {made['key']}"}
        assert client.get("/metrics", headers=key).status_code == 200
        asked = client.get("/metrics", headers=key | {"Accept": "application/openmetrics-text; version=1.0.0"})
        assert asked.headers["content-type"].startswith("application/openmetrics-text")
        assert "perfagent_ingest_frames" in {family.name for family in open_metrics(asked.text)}
