"""Sends frames to a server that is killed again and again, and says which were acknowledged."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter

import httpx
from api_builders import MSGPACK, frame
from builders import ServerProcess

from perfagent.wire import Event, encode

__all__ = ["FrameSender", "stored_once"]


class FrameSender(threading.Thread):
    """Ranks of several runs, whose frames are sent until they are acknowledged. acknowledged: run and rank -> the
    newest step."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._stop_now = url, threading.Event()
        self.acknowledged: Counter[tuple[str, int]] = Counter()

    def run(self) -> None:
        for seq in itertools.count(1):
            for run, rank in itertools.product(("one", "two", "three"), (0, 1)):
                events = [Event(kind="state", time=time.time(), step=0, data={"state": "running"})] if seq == 1 else []
                body = encode(frame({"loss": [float(seq)]}, run=run, rank=rank, seq=seq, first_step=seq, events=events))
                if not self._sent(body):
                    return
                self.acknowledged[run, rank] = seq
            time.sleep(0.05)

    def _sent(self, body: bytes) -> bool:
        while not self._stop_now.is_set():
            with contextlib.suppress(httpx.TransportError):  # cut off, or the server of this connection is gone
                answer = httpx.post(f"{self._url}/api/v1/ingest", content=body, headers=MSGPACK, timeout=20)
                if answer.status_code == 200:
                    return True
                assert answer.status_code == 503, answer.text
            time.sleep(0.05)
        return False

    def stop(self) -> None:
        self._stop_now.set()
        self.join(30)


def stored_once(sender: FrameSender, server: ServerProcess) -> None:
    """Checks that the server has every acknowledged sample, with its value, and none twice."""
    for (run, rank), last in sender.acknowledged.items():
        stored = [row for row in server.export(run) if row["name"] == "loss" and row["rank"] == rank]
        assert [(row["step"], row["value"]) for row in stored][:last] == [(n, float(n)) for n in range(1, last + 1)]
