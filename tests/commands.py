"""The `perfagent` command, as a process of its own or in this one, which saves each the second that its imports take.

For what a command does the one in this process is as good: `perfagent.cli.main` is all that the installed program
calls.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from builders import job_environment
from preloaded import Ended

from perfagent import cli

__all__ = ["perfagent", "perfagent_process"]


def perfagent(folder: Path, *arguments: str, **env: str) -> Ended:
    """The command in this process, to its end, with the environment that a process would get."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, job_environment(folder, **env), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main(arguments)
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            return Ended(ended.code, _text(out), _text(err))
    raise AssertionError(f"perfagent {arguments} came back: main() ends with an exit code")


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def perfagent_process(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perfagent", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=job_environment(folder, **env),
    )
