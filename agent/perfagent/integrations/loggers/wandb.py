"""Weights & Biases: `wandb.log` is `Run.log`, bound when a run begins; both call `Run._log`.

`commit=False` adds to a step that later calls go on with: W&B's own count stays where it is, as the step in progress
does.
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
    """library: wandb.sdk.wandb_run."""
    patch(library.Run, "_log", _watch_log)
    patch(library.Run, "_finish", _watch_finish)  # both run.finish() and the end of a `with` call it


@captured
def _watch_log(run: Any, data: Any, step: Any = None, commit: Any = None) -> list[Logs]:  # noqa: ARG001
    """A dict among the values is a group of charts, with a dot in their names."""
    return [Logs(data, step, own_step=getattr(run, "_local_step", None), joint=".")]


@captured
def _watch_finish(run: Any, *_: Any, **__: Any) -> list[Logs]:
    """Afterwards `wandb.run` is gone, and with it what was set since the agent's last look."""
    note("wandb", dict(run.config.items()))
    return []
