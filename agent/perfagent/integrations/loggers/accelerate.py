"""Accelerate: `Accelerator.log`, with or without trackers, which it calls on the main process only."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: accelerate.accelerator."""
    patch(library.Accelerator, "log", _watch_log)


@captured
def _watch_log(accelerator: Any, values: Any, step: Any = None, *_: Any, **__: Any) -> list[Logs]:
    return [Logs(values, step, joint="/")] if accelerator.is_main_process else []
