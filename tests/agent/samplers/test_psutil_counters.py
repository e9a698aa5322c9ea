"""The figures of systems without /proc: psutil's, which works on Linux too, where both must agree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from recording_transport import RecordingTransport

from perfagent.agent_config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
from perfagent.samplers.proc_counters import ProcHost
from perfagent.samplers.psutil_counters import PsutilCounters
from perfagent.samplers.sampler import Sampler

pytestmark = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="compares with /proc")


def test_without_proc_a_run_has_the_figures_of_host_and_process(tmp_path: Path) -> None:
    """The processor's counter at nearly the same moment: between two readings of /proc."""
    proc = ProcHost()
    first, cpu, last = proc.cpu(), PsutilCounters().cpu(), proc.cpu()
    assert first is not None and cpu is not None and last is not None
    ticks = os.sysconf("SC_CLK_TCK")
    assert first.idle / ticks - 0.5 <= cpu.idle <= last.idle / ticks + 0.5
    moment = [100.0]
    identity = Identity(project="p", run="r", attempt=1)
    sender = Sender(AgentConfig(state_dir=tmp_path), identity, transport=RecordingTransport())
    sampler = Sampler(
        sender, step=lambda: 1, device=lambda: None, environ={}, proc=tmp_path / "none", clock=lambda: moment[0]
    )
    for _ in range(2):
        sampler.poll()
        moment[0] += 10.0
    assert {
        "host/memory_used_bytes", "host/memory_total_bytes", "host/load1", "host/cores",
        "process/rss_bytes", "process/cpu_pct", "process/threads",
    } <= set(sender.rows[-1][3])  # type: ignore[index]  # fmt: skip
    sampler.resign()
