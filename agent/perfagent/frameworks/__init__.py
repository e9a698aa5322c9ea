"""What some frameworks do in their own way: one adapter each, loaded only in a process that has imported that
framework.

Most need none for their steps: the Transformers Trainer, Accelerate, DDP and FSDP2 call their model, step ordinary
optimizers, call `torch.autograd.backward` and read a DataLoader, which is what the hooks watch. docs/compatibility.md
has the table.

An adapter is a module with `install(patch)`; `patch(owner, name, watch)` replaces an attribute until the run ends.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from perfagent.boundary.dynamo import keep_out_of_frames

__all__ = ["ADAPTERS", "Patch", "install", "install_adapters"]

Patch = Callable[[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], None]

ADAPTERS = {
    "deepspeed.runtime.engine": "perfagent.frameworks.deepspeed",
    "fastai.optimizer": "perfagent.frameworks.fastai",
    "lightning.pytorch.strategies.strategy": "perfagent.frameworks.lightning",
    "poutyne.framework.model": "perfagent.frameworks.poutyne",
    "pytorch_lightning.strategies.strategy": "perfagent.frameworks.lightning",
    "timm.utils.agc": "perfagent.frameworks.timm",
    "torch.distributed.pipelining.stage": "perfagent.frameworks.pipelining",
    "transformers.trainer_callback": "perfagent.frameworks.huggingface",
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
