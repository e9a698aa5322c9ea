"""One adapter per tracker: load (the import), start, log, finish. Each runs in a process and a virtual environment of
its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workloads import Workload  # imports torch, which the measuring process does not need

__all__ = ["TRACKERS", "Adapter", "Tracker"]


class Adapter:
    """Logs nothing: what the clocks of the benchmark themselves cost."""

    def load(self) -> None: ...
    def start(self, folder: Path, workload: Workload) -> None: ...
    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def finish(self) -> None: ...


class PerfagentLog(Adapter):
    """Values that the script logs itself, as with the others."""

    def load(self) -> None:
        import perfagent

        self.module = perfagent

    def start(self, folder: Path, workload: Workload) -> None:
        self.run = self.module.init(project="bench")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics)

    def finish(self) -> None:
        self.run.finish()


class PerfagentAttach(PerfagentLog):
    """The same, and loss, phases, gradients, host and device by themselves."""

    def start(self, folder: Path, workload: Workload) -> None:
        self.run = self.module.attach(workload.model, workload.optimizer, project="bench")


class Floor(Adapter):
    """The least that anything in Python does which a SIGKILL costs 200 ms and which shows values by the second.

    Rows go through a deque; a thread appends those of each 150 ms to a file as they are, and sends those of a second to
    a socket as JSON. Nothing is timed, looked at, redacted, acknowledged or sent again, and nothing of the host is
    read.
    """

    TICK_S, TICKS_A_SEND = 0.15, 7

    def load(self) -> None:
        import json
        import marshal
        import socket
        import threading
        from collections import deque

        self.encode, self.note, self.socket, self.threading, self.rows = (
            json.dumps,
            marshal.dumps,
            socket,
            threading,
            deque(),
        )

    def start(self, folder: Path, workload: Workload) -> None:
        self.file = os.open(folder / "rows", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.listener = self.socket.create_server(("127.0.0.1", 0))
        self.threading.Thread(target=self._receive, daemon=True).start()
        self.connection = self.socket.create_connection(self.listener.getsockname())
        self.ended = self.threading.Event()
        self.thread = self.threading.Thread(target=self._deliver, daemon=True)
        self.thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((time.time_ns(), step, metrics))

    def finish(self) -> None:
        self.ended.set()
        self.thread.join()

    def _receive(self) -> None:
        connection, _ = self.listener.accept()
        while connection.recv(1 << 16):
            pass

    def _deliver(self) -> None:
        unsent: list[tuple[int, int, dict[str, float]]] = []
        ticks = 0
        while not self.ended.wait(self.TICK_S):
            ticks += 1
            new = [self.rows.popleft() for _ in range(len(self.rows))]
            if new:
                os.write(self.file, self.note(new))
                unsent += new
            if ticks % self.TICKS_A_SEND == 0 and unsent:
                self.connection.sendall(self._body(unsent))
                unsent.clear()

    def _body(self, rows: list[tuple[int, int, dict[str, float]]]) -> bytes:
        times, steps, metrics = zip(*rows, strict=True)
        series = {name: [row.get(name) for row in metrics] for name in metrics[0]}
        return self.encode({"t": times, "step": steps, "m": series}).encode()


class Wandb(Adapter):
    def load(self) -> None:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DISABLE_CODE="true")
        import wandb

        self.module = wandb

    def start(self, folder: Path, workload: Workload) -> None:
        self.run = self.module.init(project="bench", dir=str(folder), mode="offline")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics)

    def finish(self) -> None:
        self.run.finish()


class Trackio(Adapter):
    def load(self) -> None:
        os.environ.update(TRACKIO_DIR=str(Path.cwd() / "trackio"), GRADIO_ANALYTICS_ENABLED="False", HF_HUB_OFFLINE="1")
        import trackio

        self.module = trackio

    def start(self, folder: Path, workload: Workload) -> None:
        self.module.init(project="bench")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.module.log(metrics, step=step)

    def finish(self) -> None:
        self.module.finish()


class Tensorboard(Adapter):
    def load(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer_type = SummaryWriter

    def start(self, folder: Path, workload: Workload) -> None:
        self.writer: Any = self.writer_type(str(folder))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


@dataclass(frozen=True, slots=True)
class Tracker:
    """environment: its virtual environment (environments.py). server: what PERFAGENT_SERVER leads to."""

    adapter: type[Adapter]
    environment: str
    server: str = "none"  # none, live, absent


TRACKERS = {
    "none": Tracker(Adapter, "perfagent"),
    "perfagent log": Tracker(PerfagentLog, "perfagent", "live"),
    "perfagent attach + log": Tracker(PerfagentAttach, "perfagent", "live"),
    "perfagent attach + log (no server)": Tracker(PerfagentAttach, "perfagent", "absent"),
    "floor": Tracker(Floor, "perfagent"),
    "trackio": Tracker(Trackio, "trackio"),
    "tensorboard": Tracker(Tensorboard, "tensorboard"),
    "wandb offline": Tracker(Wandb, "wandb"),
}
