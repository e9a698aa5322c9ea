"""Turns the words after `perfagent run` into the words that Python takes: SCRIPT or -m MODULE, and what follows.

`python train.py`, and the scripts that pip installs next to Python (torchrun, accelerate), count as what they start. A file
in the current folder comes first, as with Python. Any other command is refused: Python would report an error of its own for
it, and the server an alert for a run that never was.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from perfagent.errors import ConfigError
from perfagent.libraries import LAUNCHERS

__all__ = ["as_python_takes_them", "is_launcher", "leading_options"]

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun", *LAUNCHERS)
_WITH_A_WORD = ("-W", "-X", "--check-hash-based-pycs")


def is_launcher(words: list[str]) -> bool:
    """Whether these start others to train."""
    name = words[1] if words[0] == "-m" else Path(words[0]).name
    return name in _LAUNCHERS or " ".join((name, *words[1:2])) in _LAUNCHERS


def as_python_takes_them(words: list[str]) -> tuple[list[str], list[str]]:
    """(options for Python itself, words). Raises ConfigError for a command that is not Python's."""
    if words[0] == "-m" or Path(words[0]).is_dir():
        return [], words
    found = words[0] if Path(words[0]).is_file() else shutil.which(words[0])
    if found is None:
        return [], words  # Python says best what is missing
    if re.fullmatch(r"python[\d.]*", Path(found).name):
        ours, theirs = Path(sys.executable), Path(found)
        if theirs.resolve() != ours.resolve() or theirs.parent.resolve() != ours.parent.resolve():
            use = f"use `{found} -m perfagent run SCRIPT`"
            raise ConfigError(f"{found} is another Python than {ours}, which runs perfagent: {use}")
        return _behind_python(words[1:])
    with Path(found).open("rb") as file:
        line, _, rest = file.read(1024).partition(b"\n")
    # where Python's path is too long for the first line, pip writes a shell's
    is_python = b"python" in line or rest.startswith(b"'''exec'")
    if line.startswith(b"\x7fELF") or (line.startswith(b"#!") and not is_python):
        raise ConfigError(
            f"a Python script, or -m and a module, must follow; {words[0]} is none: "
            "put `perfagent run` in front of the Python script that trains, where that is started"
        )
    return [], [found, *words[1:]]


def _behind_python(words: list[str]) -> tuple[list[str], list[str]]:
    options = leading_options(words)
    rest = words[len(options) :]
    if not rest or rest[0] == "-" or rest[0].startswith("-c"):
        raise ConfigError("a script, or -m and a module, must follow `python`: neither nothing nor - nor -c")
    if rest[0].startswith("-m") and rest[0] != "-m":
        rest = ["-m", rest[0][2:], *rest[1:]]
    return options, rest


def leading_options(words: list[str]) -> list[str]:
    """Options of Python itself, up to the first word that is none of them, or that ends them (-m, -c)."""
    options: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word in ("-", "--") or word.startswith(("-m", "-c")):
            break
        options.append(word)
        if word in _WITH_A_WORD:
            options.append(next(rest, ""))
    return options
