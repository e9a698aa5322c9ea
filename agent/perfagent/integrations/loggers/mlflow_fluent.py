"""MLflow's functions without a client: a call of `mlflow.log_metric(s)` that names no step is of the step in progress.

Scripts that took a function by its name before there was a run (`from mlflow import log_metric`) are looked up: what
they call is patched where they have it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: mlflow."""
    for name, watch in (("log_metric", _watch_metric), ("log_metrics", _watch_metrics)):
        original = getattr(library, name)
        for module in [*sys.modules.values()]:
            if isinstance(module, ModuleType) and vars(module).get(name) is original:
                patch(module, name, watch)


@captured
def _watch_metric(key: Any, value: Any, step: Any = None, *_: Any, **__: Any) -> list[Logs]:
    return [Logs({key: value}, step)]


@captured
def _watch_metrics(metrics: Any, step: Any = None, *_: Any, **__: Any) -> list[Logs]:
    return [Logs(metrics, step)]
