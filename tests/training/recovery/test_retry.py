"""Another try for errors that pass, and for nothing else."""

from __future__ import annotations

import errno
import random
import socket
import urllib.error
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import RecordingSender

import perfagent
from perfagent.errors import CheckpointError
from perfagent.session import Run
from perfagent_loop.retry import is_transient, pauses, retry


def failing(*errors: BaseException) -> Callable[[], str]:
    left = [*errors]

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_what_passes_is_tried_again_with_pauses_that_double() -> None:
    waited: list[float] = []
    call = failing(*(OSError(errno.EIO, "I/O error") for _ in range(5)))
    assert retry(call, tries=6, first_s=1.0, longest_s=4.0, pause=waited.append) == "done"
    for seconds, longest in zip(waited, (1.0, 2.0, 4.0, 4.0, 4.0), strict=True):
        assert longest / 2 <= seconds <= longest


def test_the_last_failure_is_raised_as_it_is() -> None:
    errors = [TimeoutError("first"), ConnectionResetError("second"), TimeoutError("third")]
    with pytest.raises(TimeoutError) as caught:
        retry(failing(*errors), tries=3, pause=lambda seconds: None)
    assert caught.value is errors[2]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "no"), ValueError("wrong"),
        OSError("without a number"), RuntimeError("CUDA error"), KeyboardInterrupt(), CheckpointError("no room"),
    ],
)  # fmt: skip
def test_what_does_not_pass_is_raised_at_once(error: BaseException) -> None:
    paused: list[float] = []
    with pytest.raises(type(error)) as caught:
        retry(failing(error), pause=paused.append)
    assert (caught.value, paused) == (error, [])


def test_a_name_server_that_is_away_passes_and_a_wrong_name_not() -> None:
    assert is_transient(socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    assert not is_transient(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert is_transient(urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")))
    assert not is_transient(urllib.error.URLError(FileNotFoundError(errno.ENOENT, "No such file")))
    assert is_transient(CheckpointError("x", transient=True))


def test_ranks_with_the_same_seed_pause_alike() -> None:
    first, second = ([*pauses(5, first_s=1, longest_s=9, seeded=random.Random(3))] for _ in range(2))
    assert first == second


def test_it_shows_on_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = RecordingSender(tmp_path)
    run = Run(sender.config, name=None, config={}, tags=[], group=None, start_step=None, sender=sender)  # type: ignore[arg-type]
    run.start()
    monkeypatch.setattr("perfagent.session._current", run)
    perfagent.retry(failing(TimeoutError("late")), what="reading a shard", pause=lambda seconds: None)
    run.log({"loss": 1.0}, step=1)
    run.finish()
    [told] = [data for kind, data, _ in sender.events if kind == "alert"]
    assert told["title"] == "reading a shard failed and is tried again"
    assert "late" in told["text"]
    assert "recovery/retries" in {name for _, values in sender.drain() for name in values}
