"""Accelerate: `Accelerator(log_with="perfagent")`, or an object as `log_with`.

https://huggingface.co/docs/accelerate/usage_guides/tracking
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from perfagent.integrations.loggers.capture import Logs, record
from perfagent.media import Media
from perfagent.run import Run
from perfagent.session import join

__all__ = ["PerfagentTracker"]


class PerfagentTracker(GeneralTracker):  # type: ignore[misc]
    """For Accelerate: `Accelerator(log_with="perfagent")` or `Accelerator(log_with=PerfagentTracker())`.

    By name, the run begins on the main process in `init_trackers`; as an object, on each rank that makes one.

    Args:
        run_name: The project, as `init_trackers` calls it.
        **options: Options of `perfagent.attach`; by name, `init_kwargs={"perfagent": {...}}`.

    Raises:
        ConfigError: An option cannot be used.
    """

    name = "perfagent"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **options: Any) -> None:
        self.tracker: Run = join(**{"project": run_name} | options)
        super().__init__()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.config.update(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: object) -> None:
        first = {
            name: next(iter(value), None) if isinstance(value, (list, tuple)) else value
            for name, value in values.items()
        }
        media = {name: values[name] for name, one in first.items() if isinstance(one, Media)}
        if media:
            self.tracker.log(media, step)
        record(Logs(values, step, joint="/"))

    def finish(self) -> None:
        """Ends the run. `accelerator.end_training()` calls it."""
        self.tracker.finish()
