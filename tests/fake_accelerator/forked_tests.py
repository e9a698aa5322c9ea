"""Runs each test that takes the fixture `fakegpu` in a fork of pytest's process, whole, with all its fixtures."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator

import pytest
from _pytest.runner import runtestprotocol

from fake_accelerator import Control, Missing, library, load

__all__ = ["ForkedTests"]


def _takes_it(item: pytest.Item) -> bool:
    return "fakegpu" in getattr(item, "fixturenames", ())


class ForkedTests:
    """A plugin. The marks `real` (it forks) and the fixture come from here."""

    @pytest.fixture
    def fakegpu(self) -> Iterator[Control]:
        """Two fake devices, as `torch.fakegpu` and `torch.accelerator` have them, and what a test may do with them."""
        try:
            yield load()
        except Missing as missing:
            pytest.skip(str(missing))

    @pytest.hookimpl(tryfirst=True)  # before tests are sorted into rings
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if _takes_it(item):
                item.add_marker("real")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """It is compiled here, where no test's time runs. What fails here fails again, and is reported, in each test."""
        if any(map(_takes_it, session.items)) and not session.config.option.collectonly:
            try:
                library()
            except (Missing, subprocess.CalledProcessError) as error:
                print(error, file=sys.stderr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not _takes_it(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in _in_a_fork(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.session._setupstate.teardown_exact(nextitem)  # what the test before it left for this one
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True


def _in_a_fork(item: pytest.Item) -> list[pytest.TestReport]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()  # its thread would not be there, and a child that cancels it waits for it
    child = os.fork()
    if not child:
        os.close(reading)
        _run(item, writing)
    os.close(writing)
    problem, said = "", b""
    try:
        with os.fdopen(reading, "rb") as answers:
            said = answers.read()
    except pytest.fail.Exception as timeout:
        problem = str(timeout)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if said:
        restored = item.config.hook.pytest_report_from_serializable
        return [restored(config=item.config, data=data) for data in pickle.loads(said)]
    problem = problem or f"its process ended with {status}, before it could say how the test went"
    return [pytest.TestReport(item.nodeid, item.location, {}, "failed", problem, "call")]


def _run(item: pytest.Item, answers: int) -> None:
    """The test, and the end of the process. What is shared by a module, or by more, is not torn down: it is the parent's."""
    try:
        reports = runtestprotocol(item, log=False, nextitem=item.parent)  # type: ignore[arg-type]
        plain = item.config.hook.pytest_report_to_serializable
        said = pickle.dumps([plain(config=item.config, report=report) for report in reports])
        with os.fdopen(answers, "wb") as pipe:
            pipe.write(said)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
