"""What a script logs by other means than `perfagent.log` appears in its run by itself: a file here for each library.

Each says only which call of the library carries which scalars, under which names and at which step (`Logs`); what all
of them have in common is in capture.py. A library is watched only in a process that imports it by itself, before
`attach` or after. Patched is what lies underneath: a method of a class, since names of functions may have been bound
before there was a run.

Our own files for TensorBoard (perfagent.mirror) are written without its SummaryWriter, so that they are not met here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from perfagent.boundary.dynamo import keep_out_of_frames
from perfagent.integrations import Patch, install_adapters

__all__ = ["LOGGERS", "install"]

LOGGERS = {
    "accelerate.accelerator": "accelerate",
    "deepspeed.monitor.monitor": "deepspeed",
    "lightning.fabric.fabric": "fabric",
    "lightning.pytorch.loggers.csv_logs": "lightning_csv",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector": "lightning",
    "mlflow": "mlflow_fluent",
    "mlflow.tracking._tracking_service.client": "mlflow_client",
    "pytorch_lightning.loggers.csv_logs": "lightning_csv",
    "pytorch_lightning.trainer.connectors.logger_connector.logger_connector": "lightning",
    "tensorboardX.writer": "tensorboard",
    "torch.utils.tensorboard.writer": "tensorboard",
    "trackio.run": "trackio",
    "transformers.trainer_callback": "transformers",
    "wandb.sdk.wandb_run": "wandb",
}
"""Module of the library -> module here that says what its calls log."""


def install(patch: Patch, when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Each now if its library is there, else when the script's own import of it is complete."""
    modules = {library: f"{__name__}.{name}" for library, name in LOGGERS.items()}
    install_adapters(modules, patch, when_imported, then=_out_of_frames)


def _out_of_frames() -> None:
    """For torch.compile, as the hooks in torch do; a process without torch has no need of it."""
    if hasattr(sys.modules.get("torch"), "compile"):
        keep_out_of_frames()
