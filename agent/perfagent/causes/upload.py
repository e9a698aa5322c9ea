"""Sends a file in pieces through the agent's own channel: each is an event, spooled and acknowledged like everything
else.
"""

from __future__ import annotations

import hashlib
import os
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender
    from perfagent.wire.evidence import Reason

__all__ = ["PIECE_BYTES", "Upload"]

PIECE_BYTES = 512 * 1024
"""A frame holds several; the server takes 8 MiB as sent."""
MOST_AT_ONCE = 12
"""At the end of a run."""


class Upload:
    """Hands in one piece a tick, so that samples keep their place between them; all that is left when the run ends.

    summary: the first event, to which parts and SHA-256 of the file are added. file: closed at the end; None where there is
    only a summary.
    """

    def __init__(self, sender: Sender, summary: dict[str, Any], file: IO[bytes] | None, *, step: int) -> None:
        self._sender, self._file, self._step = sender, file, step
        self._id = summary["profile"]
        self._parts = self._number = 0
        self.problem: Reason = {}
        if file is not None:
            self._parts = -(-file.seek(0, os.SEEK_END) // PIECE_BYTES)
            file.seek(0)
            summary |= {"parts": self._parts, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}  # type: ignore[arg-type]
            file.seek(0)
        sender.event("profile", summary, step=step)

    def poll(self) -> bool:
        """On the sender's thread. True when everything is handed in, or when it cannot be any more: see `problem`."""
        closing = self._sender.closing_at is not None
        if closing and self._parts - self._number > MOST_AT_ONCE:
            self.problem = {"key": "trace_unsent", "parts": self._parts, "sent": self._number}
        elif not closing and self._sender.config.record is None and self._sender.spool.backlog:
            return False  # what is handed in waits in memory: one frame with pieces at a time
        while self._file is not None and not self.problem and (piece := self._file.read(PIECE_BYTES)):
            self._number += 1
            data = {"profile": self._id, "part": self._number, "parts": self._parts, "payload": piece}
            self._sender.event("profile", data, step=self._step)
            if not closing:
                return False
        if self._file is not None:
            self._file.close()
        return True
