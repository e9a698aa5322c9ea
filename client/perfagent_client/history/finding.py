"""Finds the runs in files and folders, whatever wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from perfagent.errors import ConfigError
from perfagent_client.history import mlflow_files, mlflow_store, neptune, tensorboard, trackio, wandb_offline
from perfagent_client.history.old_run import Reader, Source

__all__ = ["find_runs"]

_READERS: tuple[Reader, ...] = (tensorboard, wandb_offline, mlflow_store, trackio, neptune, mlflow_files)
"""A file belongs to the first that claims it: formats that can be told by their bytes come before text."""
_DEEPEST = 12


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
    inside = sorted(folder.iterdir())
    files = [one for one in inside if one.is_file()]
    yield from _among(folder, files, claimed)
    for one in inside:
        if depth and one.is_dir() and one not in claimed and not one.is_symlink():
            yield from _below(one, depth - 1, claimed)


def _among(folder: Path, files: list[Path], claimed: set[Path]) -> Iterator[Source]:
    for reader in _READERS:
        left = [file for file in files if file not in claimed]
        for source in reader.sources(folder, left):
            claimed.update(source.paths)
            yield source
