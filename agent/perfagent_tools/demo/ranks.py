"""The demo's training job as processes: one for each rank, started and ended together.

All ranks share one pipe as their standard input. Nothing is ever written into it. Its end, when the demo closes it or
dies, tells the job that it need not wait any longer (faults.py), so that no rank outlives the demo for long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

__all__ = ["Ranks", "free_port"]

STOP_S = 5.0
"""A rank has so long to end after it was asked to; then it is killed. After Ctrl-C, torch lets a rank that waits for the
gradients of another that is gone wait at its exit, too: for ever."""


class Ranks:
    """The processes of one training job. words: what Python runs in each of them; said: gets every line that they
    print, in threads of their own."""

    def __init__(
        self, words: Sequence[str], count: int, environment: Mapping[str, str], said: Callable[[str], None]
    ) -> None:
        reading, writing = os.pipe()
        self._writing: int | None = writing
        meeting = {} if count == 1 else _meeting(count)
        self._processes = [
            subprocess.Popen(
                [sys.executable, *words],
                env={**environment, **meeting, **({"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if meeting else {})},
                stdin=reading,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches the demo first, which says to the ranks how to end
            )
            for rank in range(count)
        ]
        os.close(reading)
        self._readers = [
            threading.Thread(target=_read, args=(process.stdout, said), daemon=True) for process in self._processes
        ]
        for reader in self._readers:
            reader.start()

    def ended(self, *, within_s: float) -> bool:
        """Whether all have ended. One that failed takes the others with it, which would wait for it for ever."""
        end = time.monotonic() + within_s
        while any(process.poll() is None for process in self._processes):
            if any(process.poll() for process in self._processes):
                self.stop(signal.SIGTERM)
            elif time.monotonic() > end:
                return False
            time.sleep(0.05)
        self.let_go()
        for reader in self._readers:
            reader.join(timeout=5.0)
        return True

    def let_go(self) -> None:
        """Ends what the ranks wait for."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None

    def stop(self, number: signal.Signals) -> None:
        """Sends the signal to all, and SIGKILL to those that have not ended STOP_S later. All have ended then."""
        for process in self._processes:
            process.send_signal(number)
        end = time.monotonic() + STOP_S
        try:
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        finally:  # also where somebody presses Ctrl-C once more
            for process in self._processes:
                process.kill()
                process.wait()

    @property
    def code(self) -> int:
        """The exit code of the first rank that failed, negative for a signal; 0 when none did."""
        return next((process.returncode for process in self._processes if process.returncode), 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _meeting(count: int) -> dict[str, str]:
    """What a launcher tells its workers of how they find each other."""
    return {
        "WORLD_SIZE": f"{count}",
        "LOCAL_WORLD_SIZE": f"{count}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{free_port()}",
    }


def _read(stream: IO[str], said: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            said(line)
