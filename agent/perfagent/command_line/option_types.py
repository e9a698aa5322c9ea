"""The kinds of values that options of commands take, and the options that name a server. A kind raises argparse's own
error, in words that follow the option's name."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

__all__ = ["add_server_options", "number_above", "port", "positive", "seconds", "whole_number"]


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`, both included."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"is {text!r}, not a whole number {allowed}")
        return int(text)

    allowed = f"from {least} to {most}" if most is not None else f"above {least - 1}" if least > 0 else "from 0 on"
    return read


def number_above(least: float, most: float | None = None) -> Callable[[str], float]:
    """A number above `least`, and at most `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value < math.inf and (most is None or value <= most)):
            raise argparse.ArgumentTypeError(f"is {text!r}, not a number above {least:g}{up_to}")
        return value

    up_to = "" if most is None else f", at most {most:g}"
    return read


positive = whole_number(1)


def seconds(text: str) -> float:
    """A length of time; 0 stands for never."""
    return 0.0 if text.strip() == "0" else number_above(0)(text)


def port(text: str) -> int:
    """Where a server listens."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed are 0 (any free one) to 65535")
    return int(text)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """--server and --data, which `local_server.server_address` reads."""
    parser.add_argument(
        "--server", metavar="URL",
        help="the server's address (default: PERFAGENT_SERVER, else your server on this machine, else "
        "http://127.0.0.1:8420)",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="DIR", type=Path,
        help="the data folder of the server on this machine: for its address, and to be its administrator "
        "(default: PERFAGENT_DATA)",
    )  # fmt: skip
