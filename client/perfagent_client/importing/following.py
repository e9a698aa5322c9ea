"""Goes on with an import while files grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.importing.importer import Importer

__all__ = ["Following"]

_EVERY_S = 3.0
_SHARE = 0.1
"""Of the time, at most, that one source is read: large files are read less often."""
_QUIET_S = 600.0
"""A run whose files do not say how it ended has ended, if nothing was written for so long."""
_BESIDE = ("-wal", "-journal")
"""What SQLite writes before the file itself changes."""


class Following:
    """sources: finds them anew each time."""

    def __init__(self, importer: Importer, sources: Callable[[], Iterable[Source]]) -> None:
        self._importer, self._sources = importer, sources
        self._seen: dict[tuple[Path, ...], object] = {}
        self._due: dict[tuple[Path, ...], float] = {}
        self._live: dict[tuple[Path, ...], bool] = {}

    def run(self) -> None:
        """Until KeyboardInterrupt. Raises PerfagentError."""
        while True:
            for source in self._moved():
                began = time.monotonic()
                self._live[source.paths] = False
                self._importer.bring([source], is_live=partial(self._goes_on, source.paths))
                self._importer.finish()
                self._due[source.paths] = time.monotonic() + (time.monotonic() - began) / _SHARE
            time.sleep(_EVERY_S)

    def _moved(self) -> Iterator[Source]:
        """Those that have changed, and those with a run that may have ended by now."""
        for source in self._sources():
            if time.monotonic() < self._due.get(source.paths, 0.0):
                continue
            now = _state(source.paths)
            is_quiet = self._live.get(source.paths, False) and time.time() - _written(source.paths) > _QUIET_S
            if not source.paths or is_quiet or now != self._seen.get(source.paths):
                self._seen[source.paths] = now
                yield source

    def _goes_on(self, paths: tuple[Path, ...], run: OldRun, written: float) -> bool:
        newest = max(written, _written(paths)) if paths else written
        goes_on = run.state not in ("finished", "failed") and time.time() - newest < _QUIET_S
        self._live[paths] = self._live.get(paths, False) or goes_on
        return goes_on


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        yield path
        yield from (beside for end in _BESIDE if (beside := path.with_name(path.name + end)).exists())


def _state(paths: Iterable[Path]) -> list[tuple[Path, int, int]]:
    """Path, size and time of change (ns) of each file."""
    found = []
    for path in _files(paths):
        try:
            about = path.stat()
        except OSError:
            continue
        found.append((path, about.st_size, about.st_mtime_ns))
    return found


def _written(paths: Iterable[Path]) -> float:
    return max((one[2] / 1e9 for one in _state(paths)), default=0.0)
