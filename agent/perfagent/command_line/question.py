"""Asks the person at the terminal before something is done that cannot be taken back."""

from __future__ import annotations

import sys

from perfagent.command_line.terminal_output import is_terminal

__all__ = ["agreed", "somebody_can_answer"]


def somebody_can_answer() -> bool:
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def agreed(question: str) -> bool:
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
