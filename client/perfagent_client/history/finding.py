"""Finds the runs in files and folders, whatever wrote them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from perfagent.errors import ConfigError
from perfagent.wire.quantities import some
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
from perfagent_client.history.old_run import OldRun, Reader, Source

__all__ = ["find_runs", "of_database"]

_READERS: tuple[Reader, ...] = (
    recordings, tensorboard, wandb_offline, mlflow_store, trackio, neptune, mlflow_files, trainer_state, tables, printed,
)  # fmt: skip
"""A file belongs to the first that claims it: formats that can be recognized by their bytes come before text."""
_DEEPEST = 12
_PASSED_OVER = frozenset((".git", ".venv", "venv", "site-packages", "node_modules", "__pycache__"))
"""Where programs lie, with thousands of files. One of them is looked into when it is named itself."""


def find_runs(paths: Iterable[Path], say: Callable[[str], None] = lambda _: None) -> Iterator[Source]:
    """In files, and in folders and all below them. A linked folder below one is not looked into, as it may lead anywhere: `say`
    gets a sentence for each that leads out of `paths`. What may not be read is a source without a format, whose `read` raises
    the OSError. Raises ConfigError for a path that is not there."""
    given = [*paths]
    roots = [_real(path) for path in given]

    def linked(link: Path) -> None:
        target = _real(link)
        if not any(target.is_relative_to(root) for root in roots):
            say(f"{link} is a link to {target}, which was not looked into; name it to have it read")

    for path in given:
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"there is no file or folder {path}") from None
        except OSError as error:
            yield _refused([path], error)
            continue
        if is_folder:
            yield from _below(path, _DEEPEST, set(), linked)
        elif _is_open(path):
            yield from (source for source in _among(path.parent, [path], set()) if path in source.paths)
        else:
            yield _refused([path], _denied([path]))


def of_database(uri: str) -> Source:
    """All runs of a database of MLflow, as `mlflow ui --backend-store-uri` names it. What `read` raises: see `from_uri`."""
    return Source("mlflow", (), partial(mlflow_store.from_uri, uri))


def _below(folder: Path, depth: int, claimed: set[Path], linked: Callable[[Path], None]) -> Iterator[Source]:
    if not _is_open(folder, os.R_OK | os.X_OK):
        yield _refused([folder], _denied([folder]))
        return
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:  # it is gone
        yield _refused([folder], error)
        return
    files = [one for one in inside if os.path.isfile(one)]  # noqa: PTH113 - Path's raises, for links into closed folders
    closed = {one: None for one in files if not _is_open(one)}
    if closed:
        yield _refused([*closed], _denied([*closed]))
    yield from _among(folder, [one for one in files if one not in closed], claimed)
    for one in inside:
        if not depth or one in claimed or one.name in _PASSED_OVER or not os.path.isdir(one):  # noqa: PTH112 - the same
            continue
        if one.is_symlink():
            linked(one)
        else:
            yield from _below(one, depth - 1, claimed, linked)


def _among(folder: Path, files: list[Path], claimed: set[Path]) -> Iterator[Source]:
    for reader in _READERS:
        left = [file for file in files if file not in claimed]
        try:
            for source in reader.sources(folder, left):
                claimed.update(source.paths)
                yield source
        except OSError as error:  # a folder below it is closed, or a file is gone
            yield _refused([Path(error.filename or folder)], error)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises for a circle of links


# ---- what may not be read


def _is_open(path: Path, mode: int = os.R_OK) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _denied(paths: Sequence[Path]) -> OSError:
    others = f"; nor can {some(len(paths) - 1, 'file')} beside it" if len(paths) > 1 else ""
    return PermissionError(errno.EACCES, f"permission denied{others}")


def _refused(paths: Sequence[Path], error: OSError) -> Source:
    def read() -> Iterator[OldRun]:
        raise error

    return Source("", tuple(paths), read)
