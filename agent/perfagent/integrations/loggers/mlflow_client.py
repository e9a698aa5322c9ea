"""MLflow: where `mlflow.log_metric(s)`, `MlflowClient.log_metric` and its `log_batch` meet, whether they wait for the
server or not, and where parameters are logged.

Below `mlflow.log_metric` a step that was not named is 0: mlflow_fluent.py knows which it was.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured
from perfagent.integrations.loggers.settings import note

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: mlflow.tracking._tracking_service.client."""
    patch(library.TrackingServiceClient, "log_metric", _watch_metric)
    patch(library.TrackingServiceClient, "log_batch", _watch_batch)
    patch(library.TrackingServiceClient, "log_param", _watch_parameter)


@captured
def _watch_metric(
    client: Any, run_id: Any, key: Any, value: Any, timestamp: Any = None, step: Any = None, *_: Any, **__: Any  # noqa: ARG001
) -> list[Logs]:  # fmt: skip
    return [Logs({key: value}, step)]


@captured
def _watch_parameter(client: Any, run_id: Any, key: Any, value: Any, *_: Any, **__: Any) -> list[Logs]:  # noqa: ARG001
    note("mlflow", {key: value})
    return []


@captured
def _watch_batch(client: Any, run_id: Any, metrics: Any = (), params: Any = (), *_: Any, **__: Any) -> list[Logs]:  # noqa: ARG001
    note("mlflow", {one.key: one.value for one in params})
    by_step: dict[Any, dict[Any, Any]] = {}
    for metric in metrics:
        by_step.setdefault(metric.step, {})[metric.key] = metric.value
    return [Logs(values, step) for step, values in by_step.items()]
