"""Another try for errors that pass, and for nothing else."""

from __future__ import annotations

import errno
import random
import socket
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_recorded import Recording

import perfagent
from perfagent.errors import CheckpointError


def failing(*errors: BaseException) -> Callable[[], str]:
    left = [*errors]

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_what_passes_is_tried_again_and_shows_on_the_run(tmp_path: Path) -> None:
    """With pauses that double, alike on ranks that are seeded alike."""
    run = perfagent.init(record=tmp_path)
    ranks: list[list[float]] = [[], []]
    for waited in ranks:
        call = failing(*(OSError(errno.EIO, "I/O error") for _ in range(5)))
        options = {"tries": 6, "first_s": 1.0, "longest_s": 4.0, "what": "reading a shard", "seeded": random.Random(3)}
        assert perfagent.retry(call, pause=waited.append, **options) == "done"
        for seconds, longest in zip(waited, (1.0, 2.0, 4.0, 4.0, 4.0), strict=True):
            assert longest / 2 <= seconds <= longest
    assert ranks[0] == ranks[1]
    run.log({"loss": 1.0}, step=1)
    run.finish()
    told = Recording(tmp_path).events("alert")[0]
    assert (told["title"], "I/O error" in told["text"]) == ("reading a shard failed and is tried again", True)
    assert "recovery/retries" in Recording(tmp_path).names()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EIO, "I/O error"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (PermissionError(errno.EACCES, "no"), False),
        (OSError("without a number"), False),
        (RuntimeError("CUDA error"), False),
        (KeyboardInterrupt(), False),
        (CheckpointError("no room"), False),
        (CheckpointError("x", transient=True), True),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), True),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
        (urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")), True),
        (urllib.error.URLError(FileNotFoundError(errno.ENOENT, "No such file")), False),
    ],
)
def test_the_last_failure_is_raised_as_it_is(error: BaseException, passes: bool) -> None:
    paused: list[float] = []
    with pytest.raises(type(error)) as caught:
        perfagent.retry(failing(TimeoutError("first"), error, error), tries=3, pause=paused.append)
    assert caught.value is error
    assert len(paused) == (2 if passes else 1)
