"""Monitors ranks that a script starts itself, by torch.multiprocessing.spawn: under `perfagent run` they are ranks of its run.

Most children never join a process group (a DataLoader's workers); one that does is monitored from that moment on. Its options
come with the program that multiprocessing gives its Python.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from perfagent.boundary.import_hooks import when_imported

__all__ = ["expect", "watch"]

P = ParamSpec("P")
R = TypeVar("R")

_GROUPS = "torch.distributed.distributed_c10d"
options_text: str | None = None
"""In a spawned child: the options of `perfagent run` (process/launch_options.py)."""
_PROGRAM = """\
try:
    from perfagent.launch.children import expect
    expect({text!r})
except Exception:
    pass
{program}"""


def watch(text: str) -> None:
    """In the process that `perfagent run` became: passes its own options on to the processes that it spawns."""
    import multiprocessing.spawn as spawn

    original = spawn.get_command_line

    @functools.wraps(original)
    def get_command_line(**words: Any) -> list[str]:
        line: list[str] = original(**words)
        if "-c" in line:  # a frozen program has none
            place = line.index("-c") + 1
            line[place] = _PROGRAM.format(text=text, program=line[place])
        return line

    spawn.get_command_line = get_command_line


def expect(text: str) -> None:
    """In a spawned child: waits until it joins a process group."""
    global options_text
    options_text = text

    def loaded() -> None:
        groups = sys.modules[_GROUPS]
        groups.init_process_group = _joining(groups.init_process_group, text)  # type: ignore[attr-defined]

    when_imported(_GROUPS, loaded)


def _joining(original: Callable[P, R], text: str) -> Callable[P, R]:
    @functools.wraps(original)
    def init_process_group(*args: P.args, **kwargs: P.kwargs) -> R:
        result = original(*args, **kwargs)
        _start(text)
        return result

    return init_process_group


def _start(text: str) -> None:
    try:
        from perfagent.process import launch_options
        from perfagent.session import current, start_from_launcher

        if current() is None and launch_options.current is None:  # the script has not attached by itself
            launch_options.current = launch_options.read(text)
            # the watcher waits for the end of the process that spawned this one, and speaks for that one's source
            launch_options.current.watched = False
            launch_options.current.start = launch_options.parents_start()
            start_from_launcher(**launch_options.current.for_session())
    except Exception as error:  # noqa: BLE001 - the training goes on without us
        sys.stderr.write(f"perfagent: not monitored: {type(error).__name__}: {error}\n")
