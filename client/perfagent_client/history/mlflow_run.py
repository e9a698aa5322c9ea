"""Converts an MLflow run, from a database or from files, to an OldRun (https://mlflow.org/docs/latest/ml/tracking)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfagent_client.history.old_run import OldRun

__all__ = ["old_run", "seconds"]

_STATES: dict[str, Any] = {"RUNNING": "running", "FINISHED": "finished", "FAILED": "failed", "KILLED": "failed"}
_GIT = {"commit": "commit", "branch": "branch", "remote": "repoURL"}
_META = {"user": "mlflow.user", "script": "mlflow.source.name"}


def old_run(
    run: str, project: str, status: str, params: Mapping[str, str], tags: Mapping[str, str], names: Mapping[str, str]
) -> OldRun:
    """run: its id. status: RUNNING, FINISHED ... names: of all runs by their ids. The runs below one parent are a group."""
    parent = tags.get("mlflow.parentRunId", "")
    git = {key: tags[tag] for key, name in _GIT.items() if (tag := f"mlflow.source.git.{name}") in tags}
    own = [key for key in sorted(tags) if not key.startswith("mlflow.")]
    return OldRun(
        source=f"mlflow:{run}",
        name=tags.get("mlflow.runName") or names.get(run) or run,
        project=project,
        group=f"{names[parent]} {parent[:8]}" if names.get(parent) else parent,
        tags=[f"{key}={tags[key]}" if tags[key] else key for key in own],
        notes=tags.get("mlflow.note.content", ""),
        config={key: _typed(value) for key, value in params.items()},
        meta={key: tags[tag] for key, tag in _META.items() if tag in tags} | ({"git": git} if git else {}),
        state=_STATES.get(status, ""),
    )


def seconds(milliseconds: object) -> float | None:
    """Unix seconds, where there are milliseconds."""
    return milliseconds / 1000 if isinstance(milliseconds, int) and abs(milliseconds) < 1 << 53 else None


def _typed(text: str) -> Any:
    """MLflow keeps str(value): a number or truth value that is written just so is one again."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if str(value) == text:
            return value
    return {"True": True, "False": False}.get(text, text)
