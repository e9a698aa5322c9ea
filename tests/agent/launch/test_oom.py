"""A real kill by the kernel's out-of-memory killer, in a control group of our own (needs the right to make one)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import job_environment, until
from ingest_server import IngestServer

LIMIT = 256 * 2**20
PORTION = LIMIT // 16
HOG = f"""
import sys
import perfagent
run = perfagent.init()
held = [bytearray({LIMIT // 4})]
for step, _ in enumerate(sys.stdin):
    perfagent.log({{"held": step}}, step=step)
    held.append(bytearray({PORTION}))
"""
"""Takes a portion of memory for each line of its standard input."""


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


@pytest.mark.real
@pytest.mark.fault
def test_a12_kill_for_memory_is_oom_with_the_last_memory_sample(tmp_path: Path, group: Path) -> None:
    (tmp_path / "hog.py").write_text(HOG)
    with IngestServer() as server:
        env = job_environment(tmp_path, PERFAGENT_SERVER=server.url)
        inside = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
        command = ["sh", "-c", inside, "sh", sys.executable, "-m", "perfagent", "run", "hog.py"]
        with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as job:
            feed(job, lambda: max(server.samples("host/memory_used_bytes"), default=0.0))
            _, printed = job.communicate(timeout=120)
        assert job.returncode == -signal.SIGKILL, printed
        until(lambda: "oom" in server.states(), within_s=30, why=f"states were {server.states()}")
        (last,) = [data for data in server.events("state") if data["state"] == "oom"]
        assert last["reason"] == {"key": "killed_for_memory"}
        assert server.samples("host/memory_used_bytes")[-1] > LIMIT - 3 * PORTION
        assert set(server.samples("host/memory_total_bytes")) == {LIMIT}
        steps = sorted(server.values("held"))
        assert steps == list(range(len(steps)))


def feed(job: subprocess.Popen[bytes], used_bytes: Callable[[], float]) -> None:
    """Let the hog take its next portion only once the server has seen the one before, however slow the machine is.

    A portion that does not show in ten seconds was paid for with page cache that the kernel took back.
    """
    assert job.stdin is not None
    seen, at = 0.0, time.monotonic()
    for _ in range(9000):
        used, now = used_bytes(), time.monotonic()
        if job.poll() is not None:
            return
        if used > seen + PORTION / 2 or now > at + 10:
            seen, at = used, now
            with contextlib.suppress(BrokenPipeError):
                job.stdin.write(b"\n")
                job.stdin.flush()
        time.sleep(0.01)
