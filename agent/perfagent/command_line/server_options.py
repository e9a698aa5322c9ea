"""--server and --data: which server a command means."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_server_options"]


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """`local_server.server_address` reads them."""
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
