"""Divides the sources of an import among processes, so that all cores read and judge."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from perfagent.errors import PerfagentError
from perfagent_client.history.old_run import Source
from perfagent_client.importing.importer import Report

__all__ = ["Done", "in_processes"]

_MOST = 8
_WORTH_BYTES = 4 * 2**20
"""Of files: to read fewer takes no longer than a process to begin."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a process did in all. imports: to which it sent something; rejected: reason -> samples; unread: sources."""

    imports: set[str]
    rejected: Counter[str]
    unread: int


_Pipe = Any
"""An end of a pipe: of one class on POSIX, of another on Windows."""
Part = Callable[[Sequence[Source], Callable[[Report], None]], Done]


def in_processes(sources: Sequence[Source], part: Part, tell: Callable[[Report | Done], None]) -> None:
    """part: brings some of the sources, telling of each run; importable by its name. tell: gets what all of them report. Raises
    the error of the first that fails, and ends the others."""
    count = min(_MOST, os.cpu_count() or 1, len(sources), 1 + sum(map(_size, sources)) // _WORTH_BYTES)
    if count < 2:
        tell(part(sources, tell))
        return
    by_size = sorted(sources, key=_size, reverse=True)
    started = [_start(part, by_size[number::count]) for number in range(count)]
    try:
        _listen([reader for _, reader in started], tell)
    finally:
        for process, reader in started:
            reader.close()
            process.terminate()
            process.join()


def _start(part: Part, sources: Sequence[Source]) -> tuple[multiprocessing.process.BaseProcess, _Pipe]:
    spawning = multiprocessing.get_context("spawn")
    reader, writer = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_work, args=(part, sources, writer), daemon=True)
    process.start()
    writer.close()  # the reader ends when the process does
    return process, reader


def _work(part: Part, sources: Sequence[Source], writer: _Pipe) -> None:
    """Ends with its parent: the pipe is broken then."""
    try:
        writer.send(part(sources, writer.send))
    except (BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:  # noqa: BLE001 - the parent raises it
        writer.send(error if isinstance(error, PerfagentError) else PerfagentError(f"{type(error).__name__}: {error}"))


def _listen(readers: list[_Pipe], tell: Callable[[Report | Done], None]) -> None:
    while readers:
        ready: list[_Pipe] = wait(readers)
        for reader in ready:
            try:
                said = reader.recv()
            except EOFError:
                readers.remove(reader)
                raise PerfagentError(
                    "a process of the import was killed; the same command again sends the rest"
                ) from None
            if isinstance(said, BaseException):
                raise said
            tell(said)
            if isinstance(said, Done):
                readers.remove(reader)


def _size(source: Source) -> int:
    return sum(path.stat().st_size for path in source.paths if path.exists())
