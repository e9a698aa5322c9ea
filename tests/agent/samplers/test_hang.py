"""A driver that does not come back: the fault that a sampler's own thread is there for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import until
from fake_nvml import FakeGpu, FakeNvml
from ingest_server import IngestServer

from perfagent.agent_config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
from perfagent.samplers.sampler import Sampler

pytestmark = pytest.mark.real


@pytest.fixture
def agents() -> Callable[[], list[str]]:
    """Names of the agent's threads in this process, but those of earlier tests."""
    old = set(threading.enumerate())
    return lambda: sorted(one.name for one in set(threading.enumerate()) - old if one.name.startswith("perfagent-"))


@pytest.fixture
def server() -> Iterator[IngestServer]:
    with IngestServer() as running:
        yield running


def started(folder: Path, server: IngestServer, library: FakeNvml) -> Sender:
    config = AgentConfig(state_dir=folder, server=server.url, sample_s=0.2)
    sender = Sender(config, Identity(project="p", run="r", attempt=1))
    Sampler(sender, step=lambda: 1, device=lambda: 0, library=library.load, environ={}).install()
    sender.start()
    return sender


@pytest.mark.fault
@pytest.mark.parametrize("at", ["probe", "reading"])
def test_a22_driver_that_hangs_costs_seconds_of_gpu_figures(
    tmp_path: Path, server: IngestServer, agents: Callable[[], list[str]], at: str
) -> None:
    def figures() -> int:
        return len(server.samples("gpu/utilization_pct"))

    gpu = FakeGpu(hanging=at == "probe")
    sender = started(tmp_path, server, FakeNvml(gpu))
    if at == "reading":
        until(figures)
        assert agents() == ["perfagent-courier", "perfagent-sender"]
        gpu.hanging = True
    assert gpu.entered.wait(20)
    until(lambda: sender.counters["couriers_lost"] == 1, why="the hanging thread was never replaced")
    assert sender.flush(20), "figures from before are on their way"
    before, seen = figures(), len(server.samples("process/rss_bytes"))
    until(lambda: len(server.samples("process/rss_bytes")) > seen + 5, why="the other samples stopped")
    until(lambda: {"what": "unavailable", "reason": "driver_hangs"} in server.events("gpu"))
    assert figures() == before
    assert sender.counters["couriers_lost"] == 1
    assert agents() == ["perfagent-courier", "perfagent-courier", "perfagent-sender"], "one of them waits in the driver"

    gpu.hanging = False
    gpu.release.set()
    until(lambda: figures() > before, why="figures did not come back with the driver")
    until(lambda: agents() == ["perfagent-courier", "perfagent-sender"], why="the thread that hung stayed")
    sender.close("finished")


@pytest.mark.fault
def test_a22_the_end_does_not_wait_for_a_driver_that_hangs(tmp_path: Path, server: IngestServer) -> None:
    gpu = FakeGpu(hanging=True)
    sender = started(tmp_path, server, FakeNvml(gpu))
    assert gpu.entered.wait(20)
    sender.close("finished", timeout_s=20.0)
    assert sender.closed.is_set()
    assert "finished" in server.states() or any((tmp_path / "spool").iterdir())  # sent, or kept for the next start
    gpu.release.set()
