"""Finds the runs in files and folders, whatever wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from perfagent.errors import ConfigError
from perfagent_client.history import (
    mlflow_files,
    mlflow_store,
    neptune,
    printed,
    recordings,
    tables,
    tensorboard,
    trackio,
    trainer_state,
    wandb_offline,
)  # fmt: skip
from perfagent_client.history.old_run import Reader, Source

__all__ = ["find_runs"]

_READERS: tuple[Reader, ...] = (
    recordings, tensorboard, wandb_offline, mlflow_store, trackio, neptune, mlflow_files, trainer_state, tables, printed,
)  # fmt: skip
"""A file belongs to the first that claims it: formats that can be told by their bytes come before text."""
_DEEPEST = 12
_PASSED_OVER = frozenset((".git", ".venv", "venv", "site-packages", "node_modules", "__pycache__"))
"""Where programs lie, with thousands of files. One of them is looked into when it is named itself."""


def find_runs(paths: Iterable[Path]) -> Iterator[Source]:
    """In files, and in folders and all below them. Raises ConfigError for a path that is not there."""
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is no file or folder {path}")
        if path.is_dir():
            yield from _below(path, _DEEPEST, set())
        else:
            yield from (source for source in _among(path.parent, [path], set()) if path in source.paths)


def _below(folder: Path, depth: int, claimed: set[Path]) -> Iterator[Source]:
    try:
        inside = sorted(folder.iterdir())
    except OSError:  # somebody else's
        return
    files = [one for one in inside if one.is_file()]
    yield from _among(folder, files, claimed)
    for one in inside:
        if depth and one.is_dir() and one not in claimed and not one.is_symlink() and one.name not in _PASSED_OVER:
            yield from _below(one, depth - 1, claimed)


def _among(folder: Path, files: list[Path], claimed: set[Path]) -> Iterator[Source]:
    for reader in _READERS:
        left = [file for file in files if file not in claimed]
        for source in reader.sources(folder, left):
            claimed.update(source.paths)
            yield source
