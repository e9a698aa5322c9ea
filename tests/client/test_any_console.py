"""Every command prints on a console that has no UTF-8, whatever a run is called and whatever signs it draws."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from builders import ServerProcess, job_environment, server_process
from recorded import send, training

from perfagent import cli

pytestmark = pytest.mark.real

NAME = "läufer 🚀 µ-1"
ENCODINGS = pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("consoles")) as running:
        steps = np.arange(1, 41)
        send(running, "r1", {**training(steps), "step_time_s": np.full(40, 3e-5)}, steps, name=NAME)
        yield running


def printed(encoding: str, folder: Path, *words: str, **env: str) -> tuple[int, str]:
    """Exit code and what it wrote to both streams, on a console of that encoding."""
    out = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    with (
        mock.patch.dict(os.environ, job_environment(folder, **env), clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main(words)
    assert isinstance(ended.value.code, int)
    out.seek(0)
    return ended.value.code, out.read()


@ENCODINGS
@pytest.mark.parametrize("words", [("runs",), ("show", "r1"), ("alerts", "list"), ("doctor", "--help")])
def test_a_command_prints_and_ends_well(
    encoding: str, words: tuple[str, ...], server: ServerProcess, tmp_path: Path
) -> None:
    code, text = printed(encoding, tmp_path, *words, PERFAGENT_SERVER=server.url)
    assert (code, "Traceback" in text) == (0, False), text
    if words[0] in ("runs", "show"):
        assert {"ascii": "l?ufer ? ?-1", "latin-1": "läufer ? µ-1", "utf-8": NAME}[encoding] in text
        code, text = printed(encoding, tmp_path, *words, "--json", PERFAGENT_SERVER=server.url)
        found = json.loads(text)
        assert (code, found.get("name") or found["runs"][0]["name"]) == (0, NAME)


@ENCODINGS
def test_an_error_about_it_is_one_line_with_its_exit_code(encoding: str, server: ServerProcess, tmp_path: Path) -> None:
    no_text = os.fsdecode(bytes(tmp_path) + b"/\xff")
    for words, ends in ((("show", "🚀"), 1), (("runs", "--limit", "µ"), 2), (("sync", no_text), 2)):
        code, text = printed(encoding, tmp_path, *words, PERFAGENT_SERVER=server.url)
        assert (code, len(text.splitlines())) == (ends, 1), text
