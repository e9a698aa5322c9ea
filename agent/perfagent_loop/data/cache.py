"""Samples that were prepared once, kept on disk for every later epoch, worker, rank and run.

An entry is written into a draft and then renamed: who looks, at whatever moment a writer dies, sees it whole or not at
all, and two processes that write the same one do no harm. Nothing waits for the disk to sync: what a power failure
leaves is found by the entry's checksum and made anew. A full disk ends writing."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from perfagent.errors import ConfigError
from perfagent_loop.data.cache_record import DamagedEntry, decode, encode, key_of
from perfagent_loop.data.mapped import StrPath, place_of

__all__ = ["CachedDataset", "DiskCache"]

logger = logging.getLogger("perfagent")
_LEFT_OVER_S = 3600.0
"""A file that nobody has renamed for so long was left by a writer that died."""
_LOOK_EVERY = 256
"""Writes between two looks at the free space."""


class DiskCache:
    """Values by key, in a folder that many processes can use at once. Can be pickled and used in DataLoader workers.

    Args:
        folder: The folder. It is made if it does not exist.
        keep_free_bytes: Nothing is written while the disk has less free space than this (1 GiB).

    Attributes:
        hits: How many values this process read from disk.
        misses: How many it had to make.
        damaged: How many of the misses were damaged entries.
        writing: False once the disk is full or refuses. What is there is still read.
    """

    def __init__(self, folder: StrPath, *, keep_free_bytes: int = 2**30) -> None:
        self.folder = Path(folder)
        self.keep_free_bytes = keep_free_bytes
        self.hits = self.misses = self.damaged = 0
        self.writing = True
        self._writes = 0
        self._drafts = self.folder / "tmp"
        try:
            self._drafts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the cache's folder {self.folder} cannot be made: {error.strerror}") from error
        self._clear_left_overs()

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """The value of a key: from disk, or from `make()`, whose result is then stored. Errors of `make()` are raised."""
        path = self._path(key)
        content = _read(path)
        if content is not None:
            try:
                value = decode(content, key)
            except DamagedEntry as error:
                self._found_damage(path, error)
            else:
                self.hits += 1
                return value
        self.misses += 1
        value = make()
        if self.writing:
            self._write(path, encode(key, value))
        return value

    def __contains__(self, key: str) -> bool:
        return self._path(key).exists()

    def verify(self) -> list[Path]:
        """Reads every entry, and removes the damaged ones. Returns their paths."""
        found = []
        for path in sorted(self.folder.glob("[0-9a-f][0-9a-f]/*.sample")):
            try:
                content = bytearray(path.read_bytes())
                decode(content, key_of(content))
            except FileNotFoundError:
                continue
            except DamagedEntry as error:
                self._found_damage(path, error)
                found.append(path)
        return found

    def clear(self) -> None:
        """Removes every entry."""
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, key: str) -> Path:
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self.folder / name[:2] / f"{name[2:]}.sample"

    def _write(self, path: Path, content: bytes) -> None:
        draft = self._drafts / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            needed = self.keep_free_bytes + len(content)
            if self._writes % _LOOK_EVERY == 0 and shutil.disk_usage(self.folder).free < needed:
                self._stop(f"less than {self.keep_free_bytes / 2**30:.1f} GiB would be left on its disk")
                return
            self._writes += 1
            draft.write_bytes(content)
            try:
                draft.replace(path)
            except FileNotFoundError:
                path.parent.mkdir(exist_ok=True)
                draft.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            self._stop(error.strerror or str(error))

    def _stop(self, why: str) -> None:
        self.writing = False
        logger.warning("perfagent: the cache %s takes no more samples in this process: %s", self.folder, why)

    def _found_damage(self, path: Path, error: DamagedEntry) -> None:
        self.damaged += 1
        if self.damaged == 1:
            logger.warning("perfagent: %s in the cache %s is damaged (%s) and made anew", path.name, self.folder, error)
        with contextlib.suppress(OSError):
            path.unlink()

    def _clear_left_overs(self) -> None:
        before = time.time() - _LEFT_OVER_S
        with contextlib.suppress(OSError), os.scandir(self._drafts) as drafts:
            for draft in itertools.islice(drafts, 10_000):
                with contextlib.suppress(OSError):
                    if draft.stat().st_mtime < before:
                        Path(draft).unlink()


def _read(path: Path) -> bytearray | None:
    """A file's bytes, read without a second copy; None where there is none."""
    try:
        with path.open("rb", buffering=0) as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            read = file.readinto(content)
            return content if read == len(content) else content[:read]
    except OSError:
        return None


class CachedDataset(Dataset[Any]):
    """A map-style dataset whose samples are computed once, and read from disk from then on.

    Workers, ranks and nodes can share the folder. Random numbers are drawn once, too: put random augmentation into a
    dataset around this one. Reading never runs code from a file.

    Args:
        dataset: A dataset with `__getitem__` and `__len__`. Samples are tensors, arrays, numbers, text, bytes, and
            containers of them.
        folder: The folder of the cache.
        version: Names everything that a sample depends on (source, tokenizer, preprocessing). Another version, or
            another length of the dataset, uses a folder of its own.
        keep_free_bytes: Nothing is written while the disk has less free space than this (1 GiB).

    Raises:
        ConfigError: The dataset is iterable, or a sample cannot be stored.
    """

    def __init__(self, dataset: Any, folder: StrPath, *, version: str = "", keep_free_bytes: int = 2**30) -> None:
        indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not indexed:
            raise ConfigError(
                f"CachedDataset needs a dataset with __getitem__ and __len__, not {type(dataset).__name__}; samples of a stream "
                "have no name to be found by: write them out with map_tokens, or use DiskCache with keys of your own"
            )
        self.dataset = dataset
        kind = type(dataset)
        identity = json.dumps([f"{kind.__module__}.{kind.__qualname__}", len(dataset), version])
        name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self.cache = DiskCache(Path(folder) / name, keep_free_bytes=keep_free_bytes)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        place = place_of(index, len(self.dataset))
        return self.cache.get(str(place), lambda: self.dataset[place])
