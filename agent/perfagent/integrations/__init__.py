"""What is true of one library: a module each, loaded only in a process that has imported that library.

Most need none for their steps: the Transformers Trainer, Accelerate, DDP and FSDP2 call their model, step ordinary
optimizers, call `torch.autograd.backward` and read a DataLoader, which is what the hooks watch. docs/compatibility.md
has the table.

An adapter is a module with `install(library, patch)`; `patch(owner, name, watch)` replaces an attribute until the run
ends. What adapters may call is in api.py.

Scripts import from here the classes by which trainers know a logger: `PerfagentCallback` of Transformers
(`report_to="perfagent"`), `PerfagentLogger` and `PerfagentLightningCallback` of Lightning, `PerfagentTracker` of Accelerate
(`log_with="perfagent"`). A class is made when it is first asked for: its base belongs to the library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from perfagent.boundary.dynamo import keep_out_of_frames
from perfagent.errors import ResourceError

__all__ = [
    "ADAPTERS", "Patch", "PerfagentCallback", "PerfagentLightningCallback", "PerfagentLogger", "PerfagentTracker",
    "install", "install_adapters",
]  # fmt: skip

Patch = Callable[[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], None]

ADAPTERS = {
    "deepspeed.runtime.engine": "perfagent.integrations.deepspeed",
    "fastai.optimizer": "perfagent.integrations.fastai",
    "lightning.pytorch.strategies.strategy": "perfagent.integrations.lightning",
    "poutyne.framework.model": "perfagent.integrations.poutyne",
    "pytorch_lightning.strategies.strategy": "perfagent.integrations.lightning",
    "timm.utils.agc": "perfagent.integrations.timm",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "perfagent.integrations.fsdp1",
    "torch.distributed.pipelining.stage": "perfagent.integrations.pipelining",
    "transformers.trainer_callback": "perfagent.integrations.huggingface",
}
"""Module of the framework -> module of ours that adapts it."""


def install(patch: Patch, when_imported: Callable[[str, Callable[[], None]], None]) -> None:
    """Each adapter now if its framework is there, else when the script's own import of it is complete."""
    install_adapters(ADAPTERS, patch, when_imported, then=keep_out_of_frames)


def install_adapters(
    adapters: Mapping[str, str],
    patch: Patch,
    when_imported: Callable[[str, Callable[[], None]], None],
    *,
    then: Callable[[], None],
) -> None:
    """adapters: module of a library -> module of ours whose `install(library, patch)` adapts it. then: called after
    each."""
    for library, adapter in adapters.items():

        def adapt(library: str = library, adapter: str = adapter) -> None:
            importlib.import_module(adapter).install(sys.modules[library], patch)
            then()

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
