"""Senders and servers of one fault row, and the books over what was handed in: the invariants that hold after every
row.

I1 what was acknowledged is stored · I2 nothing is stored twice · I5 every sample that is not stored is still in the
spool or in a counter · I6 memory and disk keep to their caps · I7 the end takes at most two seconds. I4 (nothing
reaches the user's code) is pytest's own: an exception in a thread is a warning, and warnings are errors. I3 (the
training is the same) is test_training.py.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ingest_server import IngestServer, Scripted

from perfagent.agent_config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.delivery.spool import Outgoing, Spool
from perfagent.identity import Identity
from perfagent.wire import Frame

NAMES = ("loss", "lr")
EXIT_S = 2.0


def row(step: int, loss: float = 0.5) -> tuple[Any, ...]:
    """A row of two samples, as a session hands it in."""
    return step, time.time(), time.monotonic(), NAMES, (loss, 1e-3)


class Accounts:
    """Makes the senders and servers of a test and checks the invariants over them in the end."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.servers: list[IngestServer] = []
        self.senders: list[Sender] = []

    def server(
        self, *script: Scripted, port: int = 0, rule: Callable[[Frame], Scripted | None] | None = None
    ) -> IngestServer:
        """A server that takes frames as ours does, after the answers of the script."""
        self.servers.append(IngestServer(*script, port=port, rule=rule).__enter__())
        return self.servers[-1]

    def sender(
        self,
        server: str | IngestServer,
        *,
        transport: Any = None,
        start: bool = True,
        pause_s: Callable[[int], float] | None = None,
        **settings: Any,
    ) -> Sender:
        """A sender with its threads running. pause_s: until it tries again after so many failures."""
        url = server if isinstance(server, str) else server.url
        config = AgentConfig(server=url, **({"state_dir": self.state} | settings))
        sender = Sender(config, Identity(project="p", run="r", attempt=1), transport=transport, pause_s=pause_s)
        self.senders.append(sender)
        if start:
            sender.start()
        return sender

    def close(self) -> None:
        """Ends what is running, then checks the books of every sender."""
        for sender in self.senders:
            with ends_in_time(sender):
                sender.close("")
            if sender._thread is not None:
                sender._thread.join(30.0)
                assert not sender._thread.is_alive()
        for server in self.servers:
            server.close()
        for sender in self.senders:
            self._audit(sender)

    def _audit(self, sender: Sender) -> None:
        source, spool = sender.identity.source, sender.spool
        stored = {seq: frame for server in self.servers for (of, seq), frame in server.stored.items() if of == source}
        # I2: the server's ledger holds (source, seq) once by its nature; what must not be is one sample under two
        # numbers
        seen: set[tuple[str, int, float]] = set()
        for frame in stored.values():
            for group in frame.groups:
                for name in group.values:
                    for key in zip([name] * group.rows, group.steps(), group.monotonics(), strict=True):
                        assert key not in seen, f"I2: {key} was stored under two numbers"
                        seen.add(key)
        kept = sum(frame.samples for frame in stored.values())
        acked = sender.counters["acked"] - sender.counters["duplicate"]
        anywhere = sum(f.samples for server in self.servers for f in server.stored.values())
        assert acked <= anywhere, (
            f"I1: {acked} samples were acknowledged, {anywhere} are stored (what others left included)"
        )
        left = [frame for frame in left_in(spool.folder) if frame.seq not in stored]
        waiting = sum(frame.samples for frame in left)
        gone = lost(sender)
        handed = sender.counters["samples"]
        assert handed <= kept + waiting + sum(gone.values()), (
            f"I5: {handed} samples were taken; {kept} are stored, {waiting} wait, and counters tell of {gone}"
        )
        assert bytes_in(spool.folder) <= sender.config.max_spool_bytes, "I6: the spool is larger than its cap"
        assert spool.pending_bytes <= sender.config.max_memory_bytes, "I6: memory is over its cap"


@contextmanager
def ends_in_time(sender: Sender) -> Iterator[None]:
    """I7: closing the sender inside this block takes at most EXIT_S. A wait that a busy machine ends late counts as its
    timeout."""
    late = 0.0
    wait = sender.closed.wait

    def waits(timeout: float | None = None) -> bool:
        nonlocal late
        began = time.monotonic()
        ended = wait(timeout)
        late += max(0.0, time.monotonic() - began - (math.inf if timeout is None else timeout))
        return ended

    sender.closed.wait = waits  # type: ignore[method-assign]
    began = time.monotonic()
    yield
    took = time.monotonic() - began - late
    sender.closed.wait = wait  # type: ignore[method-assign]
    assert took <= EXIT_S, f"I7: the end took {took:.2f} s"


def lost(sender: Sender) -> dict[str, int]:
    """Samples that were taken and will never be stored, by the counter that tells of them."""
    ours, spools = sender.counters, sender.spool.counters
    found = {
        "rejected": ours["rejected"],
        "dropped": ours["dropped"] + spools["dropped"],
    }
    return {name: count for name, count in found.items() if count}


def left_in(folder: Path) -> list[Outgoing]:
    """The frames that wait in a spool whose process is gone; the spool stays as it is."""
    if not folder.is_dir():
        return []
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        try:
            spool = Spool.open(Path(copy))
        except FileNotFoundError:
            return []
        frames = []
        while (frame := spool.next()) is not None:
            frames.append(frame)
            spool.ack(frame.seq)
        spool.abandon()
        return frames


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".ticks", ".frames"))
