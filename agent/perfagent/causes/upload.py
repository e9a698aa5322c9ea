"""Sends a file in pieces through the agent's own channel: each is an event, spooled and acknowledged like everything
else.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender

__all__ = ["PIECE_BYTES", "Upload"]

PIECE_BYTES = 512 * 1024
"""A frame holds several; the server takes 8 MiB as sent."""
MOST_AT_ONCE = 12
"""At the end of a run."""


class Upload:
    """Hands in one piece a tick, so that samples keep their place between them; all that is left when the run ends.

    summary: the first event, to which size, parts and SHA-256 of the file are added. file: None where there is only a
    summary.
    """

    def __init__(self, sender: Sender, summary: dict[str, Any], file: Path | None, *, step: int) -> None:
        self._sender, self._file, self._step = sender, file, step
        self._id = summary["profile"]
        self._parts = self._number = 0
        self.problem = ""
        if file is not None:
            with file.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            self._parts = -(-file.stat().st_size // PIECE_BYTES)
            summary |= {"parts": self._parts, "sha256": digest}
        self._pieces = self._read()
        sender.event("profile", summary, step=step)

    def poll(self) -> bool:
        """On the sender's thread. True when everything is handed in, or when it cannot be any more: see `problem`."""
        closing = self._sender.closing_at is not None
        if closing and self._parts - self._number > MOST_AT_ONCE:
            self.problem = f"the training ended before its trace ({self._parts} pieces) was sent; {self._number} were"
            self._forget()
            return True
        if not closing and self._sender.config.record is None and self._sender.spool.backlog:
            return False  # what is handed in waits in memory: one frame with pieces at a time
        while True:
            piece = next(self._pieces, b"")
            if not piece:
                self._forget()
                return True
            self._number += 1
            data = {"profile": self._id, "part": self._number, "parts": self._parts, "payload": piece}
            self._sender.event("profile", data, step=self._step)
            if not closing:
                return False

    def _forget(self) -> None:
        self._pieces.close()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()

    def _read(self) -> Generator[bytes, None, None]:
        if self._file is None:
            return
        with self._file.open("rb") as content:
            while piece := content.read(PIECE_BYTES):
                yield piece
