"""Lightning's logger that writes a table itself: for modules and callbacks which call a logger past the trainer.

The other loggers of Lightning write by libraries that are watched themselves.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: lightning.pytorch.loggers.csv_logs, or the same under the older name."""
    patch(library.CSVLogger, "log_metrics", _watch_log)


@captured
def _watch_log(logger: Any, metrics: Any, step: Any = None) -> list[Logs]:  # noqa: ARG001
    return [Logs(metrics, step)]
