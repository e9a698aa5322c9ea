"""A real kill by the kernel's out-of-memory killer, in a control group of our own (needs the right to make one)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import job_environment, until
from ingest_server import IngestServer

LIMIT = 256 * 2**20
HOG = """
import time
import perfagent
run = perfagent.init()
held = []
for step in range(1000):
    perfagent.log({"held": step}, step=step)
    held.append(bytearray(4 * 2**20))
    time.sleep(0.05)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A folder of a memory control group with a limit, version 1 or 2."""
    name = f"perfagent-test-{os.getpid()}"
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (one, "memory.limit_in_bytes") if one.is_dir() else (two, "memory.max")
    folder = root / name
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    until(
        lambda: not (folder / "cgroup.procs").read_text().strip(), within_s=30, why="processes were left in the group"
    )
    folder.rmdir()


@pytest.mark.fault
def test_a12_the_kernels_out_of_memory_killer_is_told_as_oom_with_the_last_memory_sample(
    tmp_path: Path, group: Path
) -> None:
    (tmp_path / "hog.py").write_text(HOG)
    with IngestServer() as server:
        env = job_environment(tmp_path, PERFAGENT_SERVER=server.url)
        inside = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
        command = ["sh", "-c", inside, "sh", sys.executable, "-m", "perfagent", "run", "hog.py"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
        until(lambda: "oom" in server.states(), within_s=30, why=f"states were {server.states()}")
        (last,) = [data for data in server.events("state") if data["state"] == "oom"]
        assert "out of memory" in last["reason"]
        assert server.samples("host/memory_used_bytes")[-1] > 0.8 * LIMIT  # the hog takes a third of it in a second
        assert set(server.samples("host/memory_total_bytes")) == {LIMIT}
        steps = sorted(server.values("held"))
        assert steps == list(range(len(steps)))
