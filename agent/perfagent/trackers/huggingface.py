"""The Transformers Trainer: `TrainingArguments(report_to="perfagent")`, or an object among its `callbacks`.

https://huggingface.co/docs/transformers/main_classes/callback
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.integrations.loggers.capture import record
from perfagent.integrations.loggers.libraries import logs_of
from perfagent.session import current, join

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PerfagentCallback"]

_TrainerCallback: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback


class PerfagentCallback(_TrainerCallback):  # type: ignore[misc]
    """For the Trainer of Transformers: `TrainingArguments(report_to="perfagent")` or
    `Trainer(callbacks=[PerfagentCallback()])`.

    Begins the run with the training, on every rank, under the `run_name` of the arguments.

    Args:
        **options: Options of `perfagent.attach`, such as `project`, `tags` and `notes`.

    Raises:
        ConfigError: An option cannot be used. Raised when the training begins.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_train_begin(self, args: Any, *_: object, model: nn.Module | None = None, **__: object) -> None:
        self._join(args, model)

    def on_log(self, args: Any, state: Any, *_: object, logs: Mapping[str, Any] | None = None, **__: object) -> None:
        """Records what the trainer logs, such as `train/loss` and `eval/loss`, at the trainer's steps."""
        if current() is None:  # `evaluate()` without a training
            self._join(args, None)
        _record(state, logs or {})

    def _join(self, args: Any, model: nn.Module | None) -> None:
        name = getattr(args, "run_name", None)
        named = {"name": name} if name and name != args.output_dir else {}  # older versions name the run as its folder
        join(model, **named | self._options)


@guarded
def _record(state: Any, logs: Mapping[str, Any]) -> None:
    for one in logs_of(state, logs):
        record(one)
