"""Lightning: what `self.log` hands to the trainer's loggers, whether it has any or none (`logger=False`).

Names are those of its loggers (`train_loss_step`, `val_loss`, `epoch`). Lightning counts batches and the steps of all
optimizers; the step here is the optimizer step that was completed last. Where the trainer names a step, in an
evaluation that logs each of its batches, or the module logs one under the name `step`, it is that.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from perfagent.integrations.loggers.capture import Logs, captured
from perfagent.step.state import state

if TYPE_CHECKING:
    from perfagent.integrations import Patch

__all__ = ["install"]


def install(library: ModuleType, patch: Patch) -> None:
    """library: lightning.pytorch.trainer.connectors.logger_connector.logger_connector, or the same under the older
    name."""
    patch(library._LoggerConnector, "log_metrics", _watch_log)


@captured
def _watch_log(connector: Any, metrics: Any, step: Any = None) -> list[Logs]:
    trainer = connector.trainer
    if not metrics or not trainer.is_global_zero:
        return []
    values = dict(metrics)
    if step is None:
        step = values.pop("step", None)
        if step is None:
            values.setdefault("epoch", trainer.current_epoch)
            step = _last_completed(trainer)
    return [Logs(values, step, joint="/")]


def _last_completed(trainer: Any) -> int:
    p = state.current
    if p is not None and p.last is not None:
        return p.completed
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
