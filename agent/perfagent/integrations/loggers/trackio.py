"""Trackio: `trackio.log` and `Run.log`, of which the first calls the second."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured
from perfagent.integrations.loggers.settings import note

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: trackio.run."""
    patch(library.Run, "log", _watch_log)
    patch(library.Run, "finish", _watch_finish)


@captured
def _watch_log(run: Any, metrics: Any, step: Any = None) -> list[Logs]:
    _note(run)
    return [Logs(metrics, step, own_step=getattr(run, "_next_step", None))]


@captured
def _watch_finish(run: Any) -> list[Logs]:
    """What was set since the last log()."""
    _note(run)
    return []


def _note(run: Any) -> None:
    if isinstance(config := getattr(run, "config", None), dict):
        note("trackio", {name: value for name, value in config.items() if not str(name).startswith("_")})
