"""Lightning Fabric: `Fabric.log` and `log_dict`, of which the first calls the second. Its loggers write on rank 0."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: lightning.fabric.fabric."""
    patch(library.Fabric, "log_dict", _watch_log)


@captured
def _watch_log(fabric: Any, metrics: Any, step: Any = None) -> list[Logs]:
    return [Logs(metrics, step, joint="/")] if fabric.is_global_zero else []
