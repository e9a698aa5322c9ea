"""What a collector of OpenTelemetry gets: a real receiver of OTLP, which decodes its protocol."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import Receiver, until
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.semconv._incubating.metrics import hw_metrics

from perfagent.errors import ConfigError
from perfagent_server.settings import Settings


def points(receiver: Receiver) -> dict[str, list[tuple[dict[str, Any], float, str, str]]]:
    """Of the newest export: name -> (attributes, value, unit, kind)."""
    sent = receiver.deliveries[-1]
    body = gzip.decompress(sent.body) if sent.body[:2] == b"\x1f\x8b" else sent.body
    found: dict[str, list[tuple[dict[str, Any], float, str, str]]] = {}
    for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        for metric in (one for scope in resource.scope_metrics for one in scope.metrics):
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points:
                attributes = {one.key: one.value.string_value or one.value.int_value for one in point.attributes}
                found.setdefault(metric.name, []).append((attributes, point.as_double, metric.unit, kind))
    return found


@pytest.mark.real
def test_runs_and_gpus_arrive_under_the_names_of_the_conventions(tmp_path: Path) -> None:
    gpu = {
        "gpu/utilization_pct": [50.0, 80.0], "gpu/memory_used_bytes": [1e9, 2e9], "gpu/memory_total_bytes": [8e9, 8e9],
        "gpu/power_w": [300.0, 310.0], "gpu/energy_j": [5.0, 9.0], "gpu/temperature_c": [60.0, 61.0],
    }  # fmt: skip
    with (
        Receiver() as receiver,
        api(
            tmp_path, otlp_endpoint=f"http://{receiver.address}", otlp_headers=("x-team=a=b",), otlp_interval_s=0.2
        ) as client,
    ):
        for rank in (0, 1):
            send(client, frame({"loss": [0.5, 0.25], "step_time_s": [0.1, 0.1], **gpu}, rank=rank), **ADMIN)
        until(lambda: receiver.deliveries and len(points(receiver).get("hw.gpu.utilization", ())) == 2, within_s=20)
        found = points(receiver)
        assert {one.headers["x-team"] for one in receiver.deliveries} == {"a=b"}
    [(attributes, loss, _, kind)] = found["perfagent.run.loss"]
    assert (loss, kind) == (0.25, "gauge")
    assert (attributes["perfagent.run.id"], attributes["perfagent.run.project"]) == ("r1", "p")
    of_gpus = {name: both[0][1:] for name, both in found.items() if name.startswith("hw.")}
    assert of_gpus == {
        hw_metrics.HW_GPU_UTILIZATION: (pytest.approx(0.8), "1", "gauge"),
        hw_metrics.HW_GPU_MEMORY_USAGE: (2e9, "By", "sum"),
        hw_metrics.HW_GPU_MEMORY_LIMIT: (8e9, "By", "sum"),
        hw_metrics.HW_POWER: (310.0, "W", "gauge"),
        hw_metrics.HW_ENERGY: (9.0, "J", "sum"),
        hw_metrics.HW_TEMPERATURE: (61.0, "Cel", "gauge"),
    }
    ids = [(one["hw.id"], one["hw.type"], one["perfagent.rank"]) for one, *_ in found["hw.gpu.utilization"]]
    assert ids == [("r1/rank0", "gpu", 0), ("r1/rank1", "gpu", 1)]


@pytest.mark.parametrize(
    "wrong", [{"otlp_endpoint": "collector:4318"}, {"otlp_headers": ("x",)}, {"otlp_interval_s": 0}]
)
def test_settings_that_cannot_be_used_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="otlp_"):
        Settings(**wrong)
