"""Sends the newest values of the runs that go on, and of their GPUs, to a collector of OpenTelemetry, by its SDK: OTLP
over HTTP. What /metrics shows of runs has the names `perfagent.run.*`, GPUs those of OpenTelemetry's conventions:
https://opentelemetry.io/docs/specs/semconv/hardware/gpu/ (`hw.id` is the rank that trains on it)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from perfagent import __version__
from perfagent.errors import ResourceError, how_to_install
from perfagent_server.monitoring.runs import GAUGES, RunCollector
from perfagent_server.services import Services

__all__ = ["start"]

_UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}
_GPU: dict[str, tuple[str, str, str, float]] = {
    "hw.gpu.utilization": ("gauge", "gpu/utilization_pct", "1", 0.01),
    "hw.gpu.memory.usage": ("up_down_counter", "gpu/memory_used_bytes", "By", 1.0),
    "hw.gpu.memory.limit": ("up_down_counter", "gpu/memory_total_bytes", "By", 1.0),
    "hw.power": ("gauge", "gpu/power_w", "W", 1.0),
    "hw.energy": ("counter", "gpu/energy_j", "J", 1.0),
    "hw.temperature": ("gauge", "gpu/temperature_c", "Cel", 1.0),
}
"""Name of the convention -> its instrument, our series, its unit, and what ours is multiplied by."""
_RECENT_S, _SAME_ROUND_S = 30.0, 1.0


def start(services: Services) -> Callable[[], None] | None:
    """Begins to send, where the settings name a collector; the function that ends it. Raises ResourceError without the
    SDK."""
    settings = services.settings
    if settings.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        raise ResourceError(f"otlp_endpoint needs OpenTelemetry's SDK; {how_to_install('otel')}") from error
    headers = dict(one.split("=", 1) for one in settings.otlp_headers)
    address = settings.otlp_endpoint.rstrip("/")
    exporter = OTLPMetricExporter(
        endpoint=address if urlsplit(address).path else f"{address}/v1/metrics", headers=headers
    )
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=settings.otlp_interval_s * 1000)
    resource = Resource.create({"service.name": "perfagent", "service.version": __version__})
    provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    _Newest(services).register(provider.get_meter("perfagent", __version__))
    return partial(provider.shutdown, timeout_millis=2000)


class _Newest:
    """What one export is made of: the runs are read once for all instruments."""

    def __init__(self, services: Services) -> None:
        self._store, self._runs = services.store, RunCollector(services, services.settings.metrics_runs)
        self._read_at, self._families = -math.inf, dict[str, Any]()

    def register(self, meter: Any) -> None:
        for name, words, _ in (*GAUGES, ("state", "1 for the state that it is in.", None)):
            suffix = next((one for one in _UNITS if name.endswith(one)), "")
            called = f"perfagent.run.{name.removesuffix(suffix)}"
            meter.create_observable_gauge(called, [partial(self._of_runs, name)], _UNITS.get(suffix, ""), words)
        for name, (kind, series, unit, scale) in _GPU.items():
            create = getattr(meter, f"create_observable_{kind}")
            create(name, [partial(self._of_gpus, series, scale)], unit)

    def _samples(self, name: str) -> Sequence[Any]:
        if time.monotonic() - self._read_at > _SAME_ROUND_S:
            self._families = {family.name: family.samples for family in self._runs.collect()}
            self._read_at = time.monotonic()
        found: Sequence[Any] = self._families.get(f"perfagent_run_{name}", ())
        return found

    def _of_runs(self, name: str, _options: Any) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        for sample in self._samples(name):
            yield Observation(sample.value, _attributes(sample.labels))

    def _of_gpus(self, series: str, scale: float, _options: Any) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        paces = {one.labels["run"]: one.value for one in self._samples("step_time_seconds")}
        for sample in self._samples("step"):
            run = sample.labels["run"]
            recent = max(2.0, _RECENT_S / max(paces.get(run, 0.0), 1e-3))
            found = self._store.ranks(run, series, from_step=max(0, int(sample.value - recent)))
            for rank, means in zip(found.ranks, found.mean, strict=True):
                newest = next((mean for mean in reversed(means) if math.isfinite(mean)), None)
                if newest is not None:
                    gpu = {"hw.id": f"{run}/rank{rank}", "hw.type": "gpu", "perfagent.rank": rank}
                    yield Observation(newest * scale, _attributes(sample.labels) | gpu)


def _attributes(labels: dict[str, str]) -> dict[str, Any]:
    return {f"perfagent.run.{name}" if name != "run" else "perfagent.run.id": value for name, value in labels.items()}
