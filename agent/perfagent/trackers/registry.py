"""Gives perfagent its name in the tables of loggers that Transformers and Accelerate keep.

Called when the script imports one of them; the tables themselves are filled when their modules are complete.
"""

from __future__ import annotations

import sys

from perfagent.boundary.guard import guarded
from perfagent.boundary.import_hooks import when_imported

__all__ = ["register"]


def register() -> None:
    for module, fill in _TABLES.items():
        when_imported(module, fill)


@guarded
def _transformers() -> None:
    from perfagent.trackers.huggingface import PerfagentCallback

    sys.modules[_REPORT_TO].INTEGRATION_TO_CALLBACK.setdefault("perfagent", PerfagentCallback)


@guarded
def _accelerate() -> None:
    from perfagent.trackers.accelerate import PerfagentTracker

    sys.modules[_LOG_WITH].LOGGER_TYPE_TO_CLASS.setdefault("perfagent", PerfagentTracker)


_REPORT_TO, _LOG_WITH = "transformers.integrations.integration_utils", "accelerate.tracking"
_TABLES = {_REPORT_TO: _transformers, _LOG_WITH: _accelerate}
