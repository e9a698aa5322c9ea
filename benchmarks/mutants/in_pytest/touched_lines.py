"""A plugin of pytest: which lines of the rooms each test touches, in the process of the tests.

Written into the folder that MUTANTS_COVER names: touched.* is data of coverage with a context for each test, results-*.jsonl
has a line for each test: its id, whether it passed, its seconds by the clock and of CPU. MUTANTS_ROOMS names the folders of
the rooms, with ":" between them. It stands in a folder of its own, which is all of this tool that a checkout's tests can import.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest


class Touched:
    """Switches the context of coverage from test to test. No process that a test starts is seen."""

    def __init__(self, folder: Path, rooms: list[str]) -> None:
        self._results = folder / f"results-{os.getpid()}.jsonl"
        self._coverage = coverage.Coverage(
            data_file=str(folder / f"touched.{os.getpid()}"),
            include=[f"{room}/*" for room in rooms],
            config_file=False,
        )
        self._coverage.set_option("run:core", "ctrace")  # sys.monitoring has no contexts
        self._coverage.start()
        self._passed = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        self._passed = True
        clock, cpu = time.monotonic(), time.process_time()
        try:
            return (yield)
        finally:
            took = {"seconds": round(time.monotonic() - clock, 3), "cpu_s": round(time.process_time() - cpu, 3)}
            self._coverage.switch_context("")
            with self._results.open("a") as file:
                file.write(json.dumps({"test": item.nodeid, "passed": self._passed, **took}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed = self._passed and not report.failed

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: Any) -> None:
    if hasattr(config, "workerinput"):
        folder, rooms = Path(os.environ["MUTANTS_COVER"]), os.environ["MUTANTS_ROOMS"].split(":")
        config.pluginmanager.register(Touched(folder, rooms), "touched-lines")
