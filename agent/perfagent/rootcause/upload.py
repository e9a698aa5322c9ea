"""A file in pieces through the agent's own channel: each is an event, spooled and acknowledged like everything else."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.delivery.sender import Sender

__all__ = ["PIECE_BYTES", "Upload"]

PIECE_BYTES = 512 * 1024
"""A frame holds several; the server takes 8 MiB as sent."""


class Upload:
    """Hands in one piece a tick, so that samples keep their place between them; all that is left when the run ends.

    summary: the first event, to which size, parts and SHA-256 of the file are added. file: None where there is only a summary.
    """

    def __init__(self, sender: Sender, summary: dict[str, Any], file: Path | None, *, step: int) -> None:
        self._sender, self._file, self._step = sender, file, step
        self._id = summary["profile"]
        self._parts = 0
        if file is not None:
            size = file.stat().st_size
            digest = hashlib.sha256()
            with file.open("rb") as content:
                while piece := content.read(PIECE_BYTES):
                    digest.update(piece)
            self._parts = -(-size // PIECE_BYTES)
            summary |= {"parts": self._parts, "sha256": digest.hexdigest()}
        self._pieces = self._read()
        sender.event("profile", summary, step=step)

    def poll(self) -> bool:
        """On the sender's thread. True when everything is handed in."""
        closing = self._sender.closing_at is not None
        while True:
            number, piece = next(self._pieces, (0, b""))
            if not piece:
                if self._file is not None:
                    with contextlib.suppress(OSError):
                        self._file.unlink()
                return True
            data = {"profile": self._id, "part": number, "parts": self._parts, "payload": piece}
            self._sender.event("profile", data, step=self._step)
            if not closing:
                return False

    def _read(self) -> Iterator[tuple[int, bytes]]:
        if self._file is None:
            return
        with self._file.open("rb") as content:
            number = 0
            while piece := content.read(PIECE_BYTES):
                number += 1
                yield number, piece
