"""Runs tests in forks of a process that has imported the libraries once, but nothing of the checkout: ten seconds of each run.

As a program, in the folder of a checkout: a line of JSON in: {"options": [...], "files": [...], "tests": [...],
"cpu_s": ..., "seconds": ..., "log": ...}; one out: {"failed": the first test that failed or null, "ended": "passed",
"failed", "broken" or "late"}. The tests run in the order given, up to the first that fails. Ends at the end of its input.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

# What takes longest to import of all that tests and sources use.
LIBRARIES = [
    "numpy",
    "torch",
    "torch._dynamo",
    "hypothesis",
    "httpx",
    "msgspec",
    "sqlalchemy",
    "sqlalchemy.dialects.sqlite",
    "sqlalchemy.dialects.postgresql",
    "psycopg",
    "alembic.command",
    "fastapi",
    "fastapi.testclient",
    "uvicorn",
    "pydantic",
    "pyarrow.parquet",
    "dash",
    "plotly.graph_objects",
    "apprise",
    "re2",
    "zstandard",
    "rich",
    "jinja2",
]


def main() -> None:
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    answers = os.fdopen(os.dup(1), "w")
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        wanted = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _run(wanted, writing)
        os.close(writing)
        ready, _, _ = select.select([os.pidfd_open(child)], [], [], wanted["seconds"])
        process = psutil.Process(child)
        started = process.children(recursive=True)
        if not ready:
            process.kill()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for one in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        with os.fdopen(reading) as file:
            failed = file.read().splitlines()[:1]
        late = not ready or code in (-signal.SIGXCPU, -signal.SIGKILL)
        ended = "late" if late else {0: "passed", 1: "failed"}.get(code, "broken")
        print(json.dumps({"failed": failed[0] if failed else None, "ended": ended}), file=answers, flush=True)


def _run(wanted: dict[str, Any], writing: int) -> None:
    """In the fork: ends the process."""
    os.setsid()
    log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    cpu_s = int(wanted["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    options = ["-x", "--hypothesis-seed=0", "--tb=short", *wanted["options"]]
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # LIBRARIES have plugins
    code = pytest.main([*options, *wanted["files"]], plugins=[_Chosen(wanted["tests"], writing)])
    sys.stdout.flush()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # the helpers of tests end the processes that they keep
    os._exit(int(code))


class _Chosen:
    """A plugin: only these tests, in this order."""

    def __init__(self, tests: list[str], writing: int) -> None:
        self._order = {test: place for place, test in enumerate(tests)}
        self._writing = writing

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after all others, which may shuffle
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
        yield
        chosen = [item for item in items if item.nodeid in self._order]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._order])
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._writing, f"{report.nodeid}\n".encode())


if __name__ == "__main__":
    main()
