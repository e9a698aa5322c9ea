"""Lightning's Trainer and Fabric: a logger, and a callback for trainings that keep another logger.

Both come from the package that the script uses, `lightning` or its older name `pytorch_lightning`.
https://lightning.ai/docs/pytorch/stable/extensions/logging.html
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perfagent.calls.arguments import as_dict
from perfagent.integrations.loggers.capture import Logs, record
from perfagent.integrations.loggers.settings import note
from perfagent.media import Image, Media, Table
from perfagent.run import Run
from perfagent.session import current, join

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PerfagentLightningCallback", "PerfagentLogger"]

_PACKAGE = "lightning.pytorch"
if _PACKAGE not in sys.modules and (
    "pytorch_lightning" in sys.modules or importlib.util.find_spec("lightning") is None
):
    _PACKAGE = "pytorch_lightning"
_Logger: Any = importlib.import_module(f"{_PACKAGE}.loggers.logger").Logger
_Callback: Any = importlib.import_module(f"{_PACKAGE}.callbacks").Callback
_rank_zero_only: Any = importlib.import_module(f"{_PACKAGE}.utilities").rank_zero_only


class PerfagentLogger(_Logger):  # type: ignore[misc]
    """For Lightning and Fabric: `Trainer(logger=PerfagentLogger(project="mine"))`, `Fabric(loggers=PerfagentLogger())`.

    Begins the run on every rank, when the trainer or the script first asks for it.

    Args:
        **options: Options of `perfagent.attach`, such as `project`, `name` and `tags`.

    Raises:
        ConfigError: An option cannot be used.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    @property
    def experiment(self) -> Run:
        """The run: `self.logger.experiment.log({"samples": perfagent.Image(x)})`."""
        return current() or join(**self._options)

    @property
    def name(self) -> str:
        """The project. Lightning puts checkpoints into a folder of this name and the version."""
        return self.experiment.project

    @property
    def version(self) -> str | None:
        """The run's id."""
        return self.experiment.id

    def log_graph(self, model: nn.Module, input_array: object = None) -> None:  # noqa: ARG002
        """Gives the module to the run. The trainer calls this on every rank before it trains."""
        join(model, **self._options)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if _rank_zero_only.rank == 0:
            _ = self.experiment
            record(Logs(metrics, step, joint="/"))

    def log_hyperparams(self, params: object, *_args: object, **_kwargs: object) -> None:
        """Adds hyperparameters to the run's configuration. The run also finds those of the module by itself."""
        _ = self.experiment
        note("lightning", as_dict(params))

    def log_image(self, key: str, images: list[Any], step: int | None = None, caption: list[str] | None = None) -> None:
        """Records images.

        Args:
            key: The name.
            images: Anything that `perfagent.Image` takes.
            step: The step that they belong to.
            caption: One text for each image.
        """
        captions: Sequence[str | None] = caption or [None] * len(images)
        self._log_media(key, [Image(image, text) for image, text in zip(images, captions, strict=True)], step)

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: Any = None,
        dataframe: object = None,
        step: int | None = None,
    ) -> None:
        """Records a table, as Lightning's loggers for other trackers do.

        Args:
            key: The name.
            columns: The names of the columns.
            data: The rows.
            dataframe: A pandas DataFrame, instead of columns and data.
            step: The step that it belongs to.
        """
        self._log_media(key, Table(columns, data or (), dataframe=dataframe), step)

    def _log_media(self, key: str, media: Media | list[Image], step: int | None) -> None:
        if _rank_zero_only.rank == 0:
            self.experiment.log({key: media}, step)


class PerfagentLightningCallback(_Callback):  # type: ignore[misc]
    """For Lightning, beside another logger: `Trainer(callbacks=[PerfagentLightningCallback()])`.

    Begins the run on every rank when the trainer sets up.

    Args:
        **options: Options of `perfagent.attach`.

    Raises:
        ConfigError: An option cannot be used.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def setup(self, trainer: object, pl_module: nn.Module, stage: str) -> None:  # noqa: ARG002
        join(pl_module, **self._options)
