"""Fixtures of all tests: an environment with nothing of ours in it, and the real things that several parts need."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import Receiver, ServerProcess, server_process

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that starts us in the background ignores it, for all our children
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)
"""The worker of a DataLoader must not collect what earlier tests left in this process: compiled kernels, event loops and thread
pools cannot be taken down in a fork (a segmentation fault in the collector, once in 3372 tests)."""

PREFIXES = ("PERFAGENT_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")


def optimizers_alive() -> list[object]:
    torch = sys.modules.get("torch")
    return [] if torch is None else [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]


def pytest_collection_finish() -> None:
    """An optimizer made while tests are collected, as a parameter of one, lives through all of them, and in each of their
    trainings it is a candidate for the one whose steps count."""
    if alive := optimizers_alive():
        raise pytest.UsageError(f"made while tests were collected: {alive}; make it inside of the test")


@pytest.fixture(autouse=True, scope="module")
def no_optimizer_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """So is one that a file of tests, or we ourselves, hold on to."""
    before = [id(optimizer) for optimizer in optimizers_alive()]
    yield
    for item in request.session.items:  # pytest holds what the last test was given until all of its teardown is over
        (getattr(item, "funcargs", None) or {}).clear()
    gc.collect()
    left = [optimizer for optimizer in optimizers_alive() if id(optimizer) not in before]
    assert not left, "something still refers to these, though their tests are over"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine's user reaches a test, and no test writes into the user's folders."""
    for name in list(os.environ):
        if name in LAUNCHERS or (name.startswith(PREFIXES) and not name.startswith("PERFAGENT_TEST_")):
            monkeypatch.delenv(name)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in this process once its compiler is imported
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A real `perfagent up`, ready, with data of its own."""
    with server_process(tmp_path / "server") as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A local webhook receiver that accepts everything."""
    with Receiver() as running:
        yield running
