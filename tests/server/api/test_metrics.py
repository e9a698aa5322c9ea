"""What Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_builders import ADMIN, api, frame, send
from builders import until
from fastapi.testclient import TestClient
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path) as running:
        yield running


def scrape(client: TestClient) -> dict[str, Metric]:
    answer = client.get("/metrics", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float | None:
    """Of the one sample of this name with at least these labels."""
    found = [
        one.value
        for family in families.values()
        for one in family.samples
        if one.name == sample and labels.items() <= one.labels.items()
    ]
    assert len(found) <= 1, found
    return found[0] if found else None


def test_requests_are_counted_by_route_template_and_status(client: TestClient) -> None:
    send(client, frame({"loss": [1.0]}, run="r1"), **ADMIN)
    for run in ("r1", "r2", "r3"):
        client.get(f"/api/v1/runs/{run}")
    for path in ("/api/v1/nowhere", "/api/v1/else/where", "/.env"):
        client.get(path)
    families = scrape(client)
    of_a_run = {"route": "/api/v1/runs/{run}", "method": "GET"}
    assert value(families, "perfagent_http_requests_total", status="200", **of_a_run) == 1
    assert value(families, "perfagent_http_requests_total", status="404", **of_a_run) == 2
    assert value(families, "perfagent_http_request_duration_seconds_count", **of_a_run) == 3
    routes = {one.labels["route"] for one in families["perfagent_http_requests"].samples}
    assert not [route for route in routes if "r1" in route or "where" in route or "env" in route], routes


def test_what_ingest_does_is_counted(client: TestClient) -> None:
    first = frame({"loss": [1.0, 2.0]}, run="r1")
    send(client, first, **ADMIN)
    send(client, first, **ADMIN)
    families = scrape(client)
    assert value(families, "perfagent_ingest_samples_total", outcome="stored") == 2
    assert value(families, "perfagent_ingest_samples_total", outcome="duplicate") == 2
    assert value(families, "perfagent_ingest_ack_seconds_count") == 2
    assert (value(families, "perfagent_ingest_received_bytes_total") or 0) > 0
    assert (value(families, "perfagent_database_commit_seconds_count") or 0) >= 1
    assert value(families, "perfagent_tail_rows") == 1
    assert (value(families, "perfagent_database_size_bytes") or 0) > 0
    assert (value(families, "process_resident_memory_bytes") or 0) > 0


def test_every_counter_of_the_server_is_there_and_named_as_prometheus_wishes(client: TestClient) -> None:
    families = scrape(client)
    counted = client.get("/api/v1/self").json()["counters"]
    unnamed = [name for name, family in families.items() if family.type == "unknown"]
    assert unnamed == [], "name them in monitoring/counters.py"
    assert sum(map(len, counted.values())) <= sum(len(family.samples) for family in families.values())
    for name, family in families.items():
        assert family.documentation, name
        if family.type == "counter":
            assert all(one.name.endswith("_total") for one in family.samples), name
        assert not name.endswith(("_s", "_ms", "_pct", "_total_total")), name


def test_runs_that_go_on_are_there_and_ended_ones_are_not(client: TestClient) -> None:
    metrics = {"loss": [0.5], "step_time_s": [0.25], "tokens_per_s": [1000.0], "gpu/utilization_pct": [80.0]}
    send(client, frame(metrics, run="r1"), **ADMIN)
    client.post("/api/v1/log", json={"run": "over", "metrics": {"loss": 1.0}, "state": "finished"}, headers=ADMIN)
    until(lambda: value(scrape(client), "perfagent_run_loss", run="r1") is not None)
    families = scrape(client)
    assert value(families, "perfagent_run_loss", run="r1", project="p") == 0.5
    assert value(families, "perfagent_run_gpu_utilization_ratio", run="r1") == pytest.approx(0.8)
    assert value(families, "perfagent_run_state", run="r1", state="running") == 1
    assert (value(families, "perfagent_run_last_contact_timestamp_seconds", run="r1") or 0) > 1e9
    names = {one.labels["name"] for one in families["perfagent_run_loss"].samples}
    assert "over" not in names


@pytest.mark.parametrize(("most", "shown", "hidden"), [(2, 2, 1), (0, 0, None)])
def test_the_number_of_runs_is_bounded(tmp_path: Path, most: int, shown: int, hidden: int | None) -> None:
    with api(tmp_path, metrics_runs=most) as client:
        for number in range(3):
            send(client, frame({"loss": [1.0]}, run=f"r{number}"), **ADMIN)
        families = scrape(client)
        samples = families["perfagent_run_step"].samples if "perfagent_run_step" in families else []
        assert len(samples) == shown
        assert value(families, "perfagent_runs_not_shown") == hidden


def test_two_apps_in_one_process_count_for_themselves(tmp_path: Path) -> None:
    with api(tmp_path / "a") as first, api(tmp_path / "b") as second:
        send(first, frame({"loss": [1.0]}, run="r1"), **ADMIN)
        assert value(scrape(first), "perfagent_ingest_frames_total") == 1
        assert value(scrape(second), "perfagent_ingest_frames_total") == 0


def test_it_needs_a_read_key_where_keys_are_needed_and_speaks_openmetrics(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        assert client.get("/metrics").status_code == 401
        made = client.post("/api/v1/keys", json={"scope": "read"}, headers=ADMIN).json()
        key = {"Authorization": f"Bearer {made['key']}"}
        assert client.get("/metrics", headers=key).status_code == 200
        asked = client.get("/metrics", headers=key | {"Accept": "application/openmetrics-text; version=1.0.0"})
        assert asked.headers["content-type"].startswith("application/openmetrics-text")
        assert "perfagent_ingest_frames" in {family.name for family in open_metrics(asked.text)}
