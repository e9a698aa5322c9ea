"""Adapters: what is true of one library, a module each, loaded only in a process that has imported that library.

Most need none for their steps: they call their model, step ordinary optimizers, call `torch.autograd.backward` and read a
DataLoader, which is what the hooks watch.

An adapter is a module with `install(library, patch)`. What adapters may call is in api.py. Where wrapping a function is all
that a library needs, it is a row of functions.py.

Scripts import from here the classes by which trainers know a logger: `PerfagentCallback` of Transformers
(`report_to="perfagent"`), `PerfagentLogger` and `PerfagentLightningCallback` of Lightning, `PerfagentTracker` of Accelerate
(`log_with="perfagent"`). A class is made when it is first asked for: its base belongs to the library.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from perfagent.errors import ResourceError

if TYPE_CHECKING:
    from perfagent.integrations.functions import Patch, WhenImported

__all__ = ["PerfagentCallback", "PerfagentLightningCallback", "PerfagentLogger", "PerfagentTracker"]

_ADAPTERS = {
    "bitsandbytes.backends.default.ops": "bitsandbytes",
    "deepspeed.runtime.engine": "deepspeed",
    "lightning.pytorch.strategies.strategy": "lightning",
    "pytorch_lightning.strategies.strategy": "lightning",
    "transformers.trainer_callback": "huggingface",
}
"""Module of the framework -> module here that adapts it."""


def install(patch: Patch, when_imported: WhenImported) -> None:
    """Each adapter now if its framework is there, else when the script's own import of it is complete."""
    for library, name in _ADAPTERS.items():

        def adapt(library: str = library, name: str = name) -> None:
            importlib.import_module(f"{__name__}.{name}").install(sys.modules[library], patch)

        when_imported(library, adapt)


_WHERE = {
    "PerfagentCallback": ("huggingface", "transformers"),
    "PerfagentLightningCallback": ("lightning", "lightning"),
    "PerfagentLogger": ("lightning", "lightning"),
    "PerfagentTracker": ("accelerate", "accelerate"),
}
"""Name -> (the module of perfagent.trackers, the package that it needs)."""


def __getattr__(name: str) -> Any:
    """Raises ResourceError where the library is not installed."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_WHERE)}")
    module, package = _WHERE[name]
    try:
        return getattr(importlib.import_module(f"perfagent.trackers.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("perfagent"):
            raise
        raise ResourceError(
            f"{name} needs {package}, and {error.name} is not installed: pip install {package}"
        ) from None


def __dir__() -> list[str]:
    return sorted(_WHERE)
