"""Gives perfagent its name in the tables of loggers that Transformers and Accelerate keep.

Called when the script imports one of them; the tables themselves are filled when their modules are complete.
"""

from __future__ import annotations

import sys
from functools import partial

from perfagent import integrations
from perfagent.boundary.guard import guarded
from perfagent.boundary.import_hooks import when_imported

__all__ = ["register"]

_TABLES = {
    "accelerate.tracking": ("LOGGER_TYPE_TO_CLASS", "PerfagentTracker"),
    "transformers.integrations.integration_utils": ("INTEGRATION_TO_CALLBACK", "PerfagentCallback"),
}
"""Module of a trainer -> its table, and our class for it."""


def register() -> None:
    for module, (table, ours) in _TABLES.items():
        when_imported(module, partial(_fill, module, table, ours))


@guarded
def _fill(module: str, table: str, ours: str) -> None:
    getattr(sys.modules[module], table).setdefault("perfagent", getattr(integrations, ours))
