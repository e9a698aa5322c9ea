"""One adapter per tracker: load (the import), start, log, finish. Each runs in a process and a virtual environment of its own."""

from __future__ import annotations

import os
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
    "trackio": Tracker(Trackio, "trackio"),
    "tensorboard": Tracker(Tensorboard, "tensorboard"),
    "wandb offline": Tracker(Wandb, "wandb"),
}
