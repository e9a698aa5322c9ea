"""The rings of the suite. `unit`: a test that starts no process, uses no socket and ends within 30 s: each test without another
mark. `real`: the others of every round. `long`: with --all only."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["UNIT_TIMEOUT_S", "Watch", "folders_together", "mark_unit_tests"]

UNIT_TIMEOUT_S = 30
OUTSIDE = ("real", "long", "browser", "postgresql", "clickhouse")
LEAVES = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.connect", "socket.bind"}
)
"""Audit events of a test that leaves its process."""


def mark_unit_tests(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(mark) for mark in OUTSIDE):
            continue
        item.add_marker("unit")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_TIMEOUT_S))


def folders_together(items: list[pytest.Item]) -> None:
    """Brings the tests of a folder together again, in the shuffled order of the folders: they share a browser and a server."""
    folders: dict[Path, list[pytest.Item]] = {}
    for item in items:
        folders.setdefault(item.path.parent, []).append(item)
    items[:] = [item for folder in folders.values() for item in folder]


class Watch:
    """A plugin that shuffles by folders, and fails a unit test that leaves its process. It notes, and does not refuse:
    perfagent catches what its own code raises. Only what the main thread does counts: a thread of an earlier test may
    still have a connection."""

    def __init__(self) -> None:
        self.left: set[str] = set()
        self._process, self._main = os.getpid(), threading.main_thread()
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if event not in LEAVES or os.getpid() != self._process or threading.current_thread() is not self._main:
            return
        if event.startswith("socket.") and isinstance(arguments[1], (str, bytes)):  # a socket that is a file
            return
        self.left.add(event)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        folders_together(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> object:
        self.left.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> object:
        result = yield
        if self.left and item.get_closest_marker("unit"):
            pytest.fail(
                f"a test of the unit ring must stay in its process, but: {', '.join(sorted(self.left))}; mark it `real`"
            )
        return result
