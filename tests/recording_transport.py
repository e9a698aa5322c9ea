"""Stands where the agent's transport stands, without a network."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from perfagent.delivery.transport import DEADLINE_S, Reply
from perfagent.wire import Frame, decode

__all__ = ["RecordingTransport"]


class RecordingTransport:
    """Keeps every frame it was given and answers from a script, then as our server does.

    answers: what to answer next, in order: a Reply, or an exception to raise. frames: everything that was posted;
    stored: the frames that were acknowledged, by (source, seq), each once, as the server's ledger does.
    """

    def __init__(self, answers: list[Reply | Exception] | None = None) -> None:
        self.answers = answers if answers is not None else []
        self.frames: list[Frame] = []
        self.stored: dict[tuple[str, int], Frame] = {}
        self.commands: list[dict[str, Any]] = []
        self.closed = False

    def post(self, body: bytes, *, encoding: str | None = None, deadline_s: float = DEADLINE_S) -> Reply:
        if encoding == "deflate":
            body = zlib.decompress(body)
        frame = decode(body)
        self.frames.append(frame)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        fresh = (frame.source, frame.seq) not in self.stored
        self.stored.setdefault((frame.source, frame.seq), frame)
        samples = frame.samples
        commands, self.commands = self.commands, []
        found = {
            "stored": samples if fresh else 0,
            "duplicate": 0 if fresh else samples,
            "rejected": [],
            "commands": commands,
        }
        return Reply(200, {"content-type": "application/json"}, msgspec.json.encode(found))

    def close(self) -> None:
        self.closed = True

    def abandon(self) -> None:
        self.closed = True
