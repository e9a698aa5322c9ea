"""A driver that does not come back: the fault that a sampler's own thread is there for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from builders import until
from fake_nvml import FakeGpu, FakeNvml
from ingest_server import IngestServer

from perfagent.agent_config import AgentConfig
from perfagent.delivery.handoff import Sender
from perfagent.identity import Identity
from perfagent.samplers.sampler import Sampler


def agents() -> list[str]:
    """Names of the agent's threads in this process, but those of earlier tests."""
    return sorted(
        thread.name for thread in threading.enumerate() if thread.name.startswith("perfagent-") and thread not in OLD
    )


OLD: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests() -> None:
    OLD.clear()
    OLD.update(threading.enumerate())


def started(folder: Path, server: IngestServer, library: FakeNvml) -> Sender:
    config = AgentConfig(state_dir=folder, server=server.url, sample_s=0.2)
    sender = Sender(config, Identity(project="p", run="r", attempt=1))
    Sampler(sender, step=lambda: 1, device=lambda: 0, library=library.load, environ={}).install()
    sender.start()
    return sender


@pytest.mark.fault
@pytest.mark.parametrize("at", ["probe", "reading"])
def test_a22_a_driver_that_hangs_costs_two_seconds_of_gpu_figures_and_nothing_else(tmp_path: Path, at: str) -> None:
    gpu = FakeGpu(hanging=at == "probe")
    with IngestServer() as server:
        sender = started(tmp_path, server, FakeNvml(gpu))
        if at == "reading":
            until(lambda: server.samples("gpu/utilization_pct"))
            assert agents() == ["perfagent-courier", "perfagent-sender"]
            gpu.hanging = True
        assert gpu.entered.wait(20)
        until(lambda: sender.counters["couriers_lost"] == 1, why="the hanging thread was never replaced")
        assert sender.flush(20), "figures from before are on their way"
        figures = len(server.samples("gpu/utilization_pct"))
        seen = len(server.samples("process/rss_bytes"))
        until(lambda: len(server.samples("process/rss_bytes")) > seen + 5, why="the other samples stopped")
        until(lambda: {"what": "unavailable", "reason": "NVML does not answer"} in server.events("gpu"))
        assert len(server.samples("gpu/utilization_pct")) == figures
        assert sender.counters["couriers_lost"] == 1
        # one of them waits in the driver
        assert agents() == ["perfagent-courier", "perfagent-courier", "perfagent-sender"]

        gpu.hanging = False
        gpu.release.set()
        until(
            lambda: len(server.samples("gpu/utilization_pct")) > figures,
            why="figures did not come back with the driver",
        )
        until(lambda: agents() == ["perfagent-courier", "perfagent-sender"], why="the thread that hung stayed")
        sender.close("finished")


@pytest.mark.fault
def test_a22_the_end_of_a_process_does_not_wait_for_a_driver_that_hangs(tmp_path: Path) -> None:
    gpu = FakeGpu(hanging=True)
    with IngestServer() as server:
        sender = started(tmp_path, server, FakeNvml(gpu))
        assert gpu.entered.wait(20)
        sender.close("finished", timeout_s=20.0)
        assert sender.closed.is_set()
        assert "finished" in server.states() or any((tmp_path / "spool").iterdir())  # sent, or kept for the next start
        gpu.release.set()
    assert os.getpid() == sender._pid
