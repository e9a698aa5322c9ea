"""The typed client of a perfagent server's HTTP API, for scripts, notebooks, the command line and the dashboard.

Each name is resolved when it is first used: `perfagent sync` and `doctor` begin without httpx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent_client.client import ApiError, AsyncClient, Client, RunDetails

__all__ = ["ApiError", "AsyncClient", "Client", "RunDetails"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'perfagent_client' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module("perfagent_client.client"), name)
