"""Lines that wait for the device: torch's warnings stand for CUDA here, Python's machinery for warnings is the real
one."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest
import torch
from agent.hooks.loops import stepping
from torch import nn

from perfagent.measure.synchronization import SynchronizingLines
from perfagent.probes.scheduler import ScheduledProbes
from perfagent.step.state import state

SAID = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1)"


class Cuda:
    """The one door: torch.cuda's debug mode."""

    mode = 0

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}[mode]
        if self.mode:
            said = "Synchronization debug mode is a prototype feature and does not yet detect all of them"
            warnings.warn(said, stacklevel=2)


INSIDE = f"""
import warnings
def inside_torch(mode):
    if mode == 1:
        warnings.warn({SAID!r}, stacklevel=1)
    return 1.0
"""
names: dict = {}
exec(compile(INSIDE, str(Path(torch.__file__).parent / "nn" / "utils" / "somewhere.py"), "exec"), names)
inside_torch = names["inside_torch"]


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


@pytest.fixture
def shown(monkeypatch):
    """What reached the user."""
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    return shown


@pytest.fixture
def listening(record, cuda, shown):
    """listening(body): the look at one step, whose loop does `body`. Of waits nothing reaches the user."""

    def patched():
        return warnings.simplefilter, warnings.filterwarnings, warnings.catch_warnings.__enter__

    def run(body, *, changes_filters=False):
        step = stepping(record)
        step()
        look = SynchronizingLines(state.current)
        before = [*warnings.filters], patched()
        assert look.at_boundary()
        assert cuda.mode == 1
        body()
        step()
        assert not look.at_boundary()
        assert cuda.mode == 0
        assert before[1] == patched()
        assert before[0] == [*warnings.filters] or changes_filters
        assert not any("synchronizing" in message for message in shown)
        return look

    return run


def test_each_line_of_the_training_thread_is_told_with_its_count(listening, cuda):
    """Not those of an evaluation, a checkpoint or a thread that pins memory: the debug mode is that of the process."""
    assert ("error", None, Warning, None, 0) in warnings.filters, "pytest runs with warnings as errors"

    def body():
        for _ in range(3):
            inside_torch(cuda.mode)
        thread = threading.Thread(target=inside_torch, args=(cuda.mode,))
        thread.start()
        thread.join()

    told, first = listening(body).most_frequent(), body.__code__.co_firstlineno
    assert [(entry["line"].rsplit("/", 1)[-1], entry["count"]) for entry in told] == [
        (f"test_synchronization.py:{first + 2}", 3)
    ]


def record_warnings():
    with warnings.catch_warnings(record=True):
        pass


@pytest.mark.parametrize("script", [record_warnings, lambda: warnings.simplefilter("error")])
def test_a_script_that_would_meet_our_warnings_ends_the_look(listening, cuda, script):
    with warnings.catch_warnings():
        look = listening(lambda: (inside_torch(cuda.mode), script(), inside_torch(cuda.mode)), changes_filters=True)
    assert look.step == 0


def test_other_warnings_pass(listening, shown):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        listening(lambda: warnings.warn("the user's own", stacklevel=1))
    assert shown == ["the user's own"]


def test_waits_are_told_as_a_series_and_an_event(record, cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a device of the test")
    model = nn.Linear(2, 1)
    optimizer, recorded = torch.optim.SGD(model.parameters(), lr=0.1), record(model)
    looks = ScheduledProbes(recorded.progress.links.investigator, recorded.sender, lambda: model, lambda: 0)
    for _ in range(30):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        inside_torch(cuda.mode)
        recorded.rows += recorded.sender.drain()
        looks.poll()
    assert [value for _, value in recorded.of("sync/calls_per_step")] == [1.0]
    (event,) = recorded.events("sync")
    assert event["lines"][0]["count"] == 1
    assert cuda.mode == 0
