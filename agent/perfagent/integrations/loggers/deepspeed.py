"""DeepSpeed's monitor, with which of its own backends ever: what the engine writes, and a script by
`engine.monitor.write_events`. It writes on rank 0 only.

Its configuration names TensorBoard, W&B, Comet and CSV files and takes no class of others, so perfagent records what
any of these is given. DeepSpeed counts samples; the step here is the run's own.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: deepspeed.monitor.monitor."""
    patch(library.MonitorMaster, "write_events", _watch_events)


@captured
def _watch_events(monitor: Any, event_list: Any) -> list[Logs]:
    """An event: (name, value, samples so far)."""
    return [Logs({event[0]: event[1] for event in event_list})] if monitor.enabled else []
