"""The Python processes that a process has started and that run now."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from perfagent.samplers.child_processes import pythons_below


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_zombie_child_hides_no_other_child() -> None:
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(waits, stdin=subprocess.PIPE) as first,
        subprocess.Popen(waits, stdin=subprocess.PIPE) as second,
    ):
        first.kill()
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        below = pythons_below(os.getpid())
        assert second.pid in below and first.pid not in below
