"""The Transformers Trainer: `Trainer.log`, with whatever `report_to`, under the names that its own callbacks write.

Captured is what it hands to its callbacks: what a subclass adds in its own `log` is among it then, and the epoch. The
callbacks write on the first process only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install", "logs_of"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: transformers.trainer_callback."""
    patch(library.CallbackHandler, "on_log", _watch_log)


@captured
def _watch_log(handler: Any, args: Any, state: Any, control: Any, logs: Any, *_: Any, **__: Any) -> list[Logs]:  # noqa: ARG001
    return logs_of(state, logs)


def logs_of(state: Any, logs: Mapping[str, Any]) -> list[Logs]:
    """state: the trainer's, which has the steps of a checkpoint as well."""
    if not state.is_world_process_zero:
        return []
    return [Logs({_written(name): value for name, value in logs.items()}, state.global_step, forwarded=logs)]


@functools.lru_cache(maxsize=4096)
def _written(name: str) -> str:
    """As its TensorBoard and W&B callbacks call it."""
    for prefix in ("eval", "test"):
        if name.startswith(f"{prefix}_"):
            return f"{prefix}/{name[len(prefix) + 1 :]}"
    return f"train/{name}"
