"""The rows of one rank's sampler, and who of several ranks speaks for the node."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recording_transport import RecordingTransport

from perfagent.agent_config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
from perfagent.samplers.cgroup import ControlGroup
from perfagent.samplers.gpu.nvml import load
from perfagent.samplers.host import HostReader
from perfagent.samplers.sampler import ELECTION_S, Sampler

TWO_RANKS = {"world_size": 2, "job_key": "job"}


class Rank:
    """A sampler with a clock of the test's, and what it hands to its sender."""

    def __init__(self, folder: Path, host: HostReader | None = None, **who: Any) -> None:
        self.now = 100.0
        identity = Identity(project="p", run="r", attempt=1, **who)
        self.sender = Sender(AgentConfig(state_dir=folder), identity, transport=RecordingTransport())
        self.sampler = Sampler(
            self.sender, step=lambda: 7, device=lambda: 0, library=load, environ={}, host=host, clock=lambda: self.now
        )

    def poll(self, times: int = 1, every_s: float = 1.0) -> dict[str, float]:
        """The last row after so many calls."""
        for _ in range(times):
            self.sampler.poll()
            self.now += every_s
        return self.rows()[-1]

    def rows(self) -> list[dict[str, float]]:
        return [dict(zip(row[3], row[4], strict=True)) for row in self.sender.rows]  # type: ignore[union-attr,misc]

    def names(self) -> set[str]:
        return {name for row in self.rows() for name in row}

    def speaks_for_the_node(self) -> bool:
        return any(name.startswith("host/") for name in self.names())


def test_a_row_a_second_with_the_step_in_progress(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    assert {"process/cpu_pct", "host/memory_used_bytes"} <= rank.poll(25, every_s=0.2).keys()
    rows: list[Any] = list(rank.sender.rows)
    assert len(rows) == 5
    assert (rows[-1][0], rows[-1][2]) == (7, pytest.approx(104.0))
    shapes = [row[3] for row in rows]
    assert all(one is other for one in shapes for other in shapes if one == other), "shapes are shared"


def test_where_memory_is_nearly_used_up_every_tick_tells_it(tmp_path: Path) -> None:
    group = ControlGroup(usage=None, limit_bytes=None, inactive=None, events=None, cores=None)
    rank = Rank(tmp_path, host=HostReader(tmp_path, group))
    for available_kb, rows in ((500, 1), (100, 5)):
        (tmp_path / "meminfo").write_text(f"MemTotal: 1000 kB\nMemFree: 50 kB\nMemAvailable: {available_kb} kB\n")
        rank.sender.rows.clear()
        rank.poll(5, every_s=0.2)
        assert sum("host/memory_used_bytes" in row for row in rank.rows()) == rows


# ---- who speaks for the node


def test_a_rank_takes_over_the_node_when_the_elected_one_is_gone(tmp_path: Path) -> None:
    first, second = (Rank(tmp_path, rank=number, local_rank=number, **TWO_RANKS) for number in (0, 1))
    second.poll()
    assert not second.speaks_for_the_node(), "the lowest local rank may be about to"
    first.poll()
    assert first.speaks_for_the_node()
    again = Rank(tmp_path, **TWO_RANKS)
    again.poll()
    assert not again.speaks_for_the_node(), "one at a time"
    for gone in (False, True):
        second.now += ELECTION_S + 1
        second.poll()
        assert second.speaks_for_the_node() == gone
        first.sampler.resign()


@pytest.mark.real
def test_where_there_is_no_driver_its_package_is_not_imported() -> None:
    script = "import sys, perfagent.samplers.gpu.nvml as nvml; print(nvml.load([])[0], 'pynvml' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "None False\n"


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_have_no_locks_the_lowest_local_rank_speaks(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for number in (0, 1):
        rank = Rank(tmp_path, rank=number, local_rank=number, **TWO_RANKS)
        rank.now += ELECTION_S + 1
        rank.poll()
        assert rank.speaks_for_the_node() == (number == 0)


@pytest.mark.fault
@pytest.mark.real
def test_a14_a_forked_child_lets_go_of_the_nodes_lock(tmp_path: Path) -> None:
    def held() -> list[tuple[int, str]]:
        files = [(int(fd.name), str(fd.readlink())) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return [(fd, path) for fd, path in files if path.endswith(".node") or path.startswith("/proc/")]

    gc.collect()  # what an earlier test let go of may close its files later, and ours would get their numbers
    before = set(held())
    rank = Rank(tmp_path, **TWO_RANKS)
    rank.poll()
    ours = [fd for fd, path in held() if (fd, path) not in before and not path.endswith("/fd")]
    assert len(ours) > 3, "the lock, and files of the kernel"
    child = os.fork()
    if child == 0:
        os._exit(len({fd for fd, _ in held()} & set(ours)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(ours) <= {fd for fd, _ in held()}
