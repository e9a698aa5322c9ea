"""perfagent under the names by which trainers know a logger: `PerfagentCallback` of Transformers (`report_to="perfagent"`),
`PerfagentLogger` and `PerfagentLightningCallback` of Lightning, `PerfagentTracker` of Accelerate (`log_with="perfagent"`).

Each joins the run that the script has begun, or begins one, and writes what the mirroring (frameworks/loggers) does not
record already. A class is made when it is first asked for: its base belongs to the library.
"""

from __future__ import annotations

import importlib
from typing import Any

from perfagent.errors import ResourceError

__all__ = ["PerfagentCallback", "PerfagentLightningCallback", "PerfagentLogger", "PerfagentTracker"]

_WHERE = {
    "PerfagentCallback": ("huggingface", "transformers"),
    "PerfagentLightningCallback": ("lightning", "lightning"),
    "PerfagentLogger": ("lightning", "lightning"),
    "PerfagentTracker": ("accelerate", "accelerate"),
}
"""Name -> (the module here, the package that it needs)."""


def __getattr__(name: str) -> Any:
    """Raises ResourceError where the library is not installed."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module, package = _WHERE[name]
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("perfagent"):
            raise
        raise ResourceError(
            f"{name} needs {package}, and {error.name} is not installed: pip install {package}"
        ) from None


def __dir__() -> list[str]:
    return sorted(__all__)
