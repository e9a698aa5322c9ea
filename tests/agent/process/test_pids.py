"""The start of a process, by which a pid that is used again is told from the first."""

from __future__ import annotations

import os
from pathlib import Path

from perfagent.process.pids import process_start

NOBODY = 2**22 + 1
"""Above the largest pid of Linux."""


def test_a_process_that_is_gone_has_no_start(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert process_start(os.getpid()) > 1
    assert process_start(os.getpid(), tmp_path / "none") == 1, "without /proc"
    assert process_start(NOBODY) == process_start(NOBODY, tmp_path / "none") == 0
