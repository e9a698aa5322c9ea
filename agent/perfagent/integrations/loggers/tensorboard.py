"""TensorBoard's writers, torch's and tensorboardX's: `SummaryWriter.add_scalar`, `add_scalars` and
`add_hparams`."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured
from perfagent.integrations.loggers.settings import note

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: torch.utils.tensorboard.writer or tensorboardX.writer."""
    patch(library.SummaryWriter, "add_scalar", _watch_scalar)
    patch(library.SummaryWriter, "add_scalars", _watch_scalars)
    patch(library.SummaryWriter, "add_hparams", _watch_hyperparameters)


@captured
def _watch_scalar(writer: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any) -> list[Logs]:  # noqa: ARG001
    return [Logs({tag: scalar_value}, global_step)]


@captured
def _watch_hyperparameters(writer: Any, hparam_dict: Any, *_: Any, **__: Any) -> list[Logs]:  # noqa: ARG001
    """Its metrics are logged by `add_scalar`, below it."""
    note("tensorboard", hparam_dict)
    return []


@captured
def _watch_scalars(
    writer: Any, main_tag: Any, tag_scalar_dict: Any, global_step: Any = None, *_: Any, **__: Any  # noqa: ARG001
) -> list[Logs]:  # fmt: skip
    """TensorBoard draws them as lines of one chart, the main tag."""
    return [Logs({f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}, global_step)]
