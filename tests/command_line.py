"""The `perfagent` command as a test runs it: in this process, which is fast, or in a pseudo-terminal, as a person
does."""

from __future__ import annotations

import argparse
import fcntl
import functools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from builders import until
from references.command_line import parsers

from perfagent import cli

WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from perfagent.cli import main; main(sys.argv[1:])"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error."""
        [line] = self.err.splitlines()
        return line


def command(capsys: pytest.CaptureFixture[str], *words: str) -> Ended:
    """In this process and its environment, with standard output and error as pipes."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    written = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, written.out, written.err)


@dataclass(frozen=True)
class Screenful:
    """What a terminal was sent. text: without colours and movements of the cursor."""

    code: int
    sent: str

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.sent)


def ran(command: Callable[[argparse.ArgumentParser], None], *words: str) -> int:
    """The exit code of a command that the agent's command line need not know."""
    parser = argparse.ArgumentParser()
    command(parser)
    options = parser.parse_args(words)
    return int(options.run(options))


def in_terminal(
    words: Sequence[str], environment: Mapping[str, str], *, rich: bool = True, **terminal: Any
) -> Screenful:
    """The command in a pseudo-terminal. rich: whether it is installed."""
    start = ["-m", "perfagent"] if rich else ["-c", WITHOUT_RICH]
    return python_in_terminal([*start, *words], environment, **terminal)


def python_in_terminal(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    columns: int = 80,
    rows: int = 50,
    typed: str = "",
    asks: str = "",
    when: str = "",
) -> Screenful:
    """A process of its own, on a terminal of that size. typed: the answer to what ends with `asks`, or what is typed once
    `when` was written."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    # pytest-xdist sets COLUMNS in its workers
    sized_by_terminal = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, *words], stdin=slave, stdout=slave, stderr=slave,
        env={**sized_by_terminal, "TERM": environment.get("TERM", "xterm-256color")}, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    sent = b""
    try:
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the last one who held the terminal has ended
                break
            if not piece:
                break
            sent += piece
            if typed and (when.encode() in sent if when else sent.rstrip().endswith(asks.encode())):
                os.write(master, typed.encode())
                typed = ""
        until(lambda: process.poll() is not None, why="the command did not end")
    finally:
        process.kill()
        os.close(master)
    return Screenful(process.wait(), sent.decode().replace("\r\n", "\n"))


@functools.cache
def commands() -> dict[str, argparse.ArgumentParser]:
    return parsers()


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(found, {})
