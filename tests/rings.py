"""Sorts the tests into three rings.

- unit: every test without another mark. It starts no process, uses no socket and ends within 30 s.
- real: the other tests of every round.
- long: tests that run with --all only.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

__all__ = ["UNIT_TIMEOUT_S", "Watch", "folders_together", "mark_unit_tests"]

UNIT_TIMEOUT_S = 30
OUTSIDE = ("real", "long", "frameworks", "browser", "postgresql", "clickhouse")
LEAVES = (
    (subprocess.Popen, "__init__"),
    (os, "fork"),
    (os, "posix_spawn"),
    (socket.socket, "connect"),
    (socket.socket, "bind"),
)
"""How a test leaves its process."""


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
        for owner, name in LEAVES:  # no audit hook: torch's compiler would see its frame, and count it
            setattr(owner, name, self._noted(getattr(owner, name), name))

    def _noted(self, original: Callable[..., object], name: str) -> Callable[..., object]:
        @functools.wraps(original)
        def noted(*arguments: object, **options: object) -> object:
            is_file = name in ("connect", "bind") and isinstance(arguments[1], (str, bytes))  # a socket that is a file
            if threading.current_thread() is threading.main_thread() and not is_file:
                self.left.add(name)
            return original(*arguments, **options)

        return noted

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
