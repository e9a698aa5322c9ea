"""perfagent: a training-job monitor. `perfagent.attach(model)` in a training script, and the rest shows by itself.

Importing this package imports nothing heavy and starts nothing; each public name is resolved when it is first used.
`config` and `run` are those of the current run, for scripts that say `import perfagent as wandb`; what else these call
is in calls/other_trackers.py.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.errors import CheckpointError as CheckpointError
    from perfagent.errors import ConfigError as ConfigError
    from perfagent.errors import PerfagentError as PerfagentError
    from perfagent.errors import ServerUnreachable as ServerUnreachable
    from perfagent.errors import Stopped as Stopped
    from perfagent.errors import WireError as WireError
    from perfagent.media import Audio as Audio
    from perfagent.media import Histogram as Histogram
    from perfagent.media import Image as Image
    from perfagent.media import Table as Table
    from perfagent.run import Run as Run
    from perfagent.session import alert as alert
    from perfagent.session import attach as attach
    from perfagent.session import finish as finish
    from perfagent.session import init as init
    from perfagent.session import log as log
    from perfagent_loop.checkpoint import Checkpoint as Checkpoint
    from perfagent_loop.compute.activation import checkpoint_activations as checkpoint_activations
    from perfagent_loop.compute.attention import best_attention as best_attention
    from perfagent_loop.compute.attention_watch import watch_attention as watch_attention
    from perfagent_loop.compute.compiling import compile_model as compile_model
    from perfagent_loop.compute.nccl import nccl_preset as nccl_preset
    from perfagent_loop.compute.packed import packed_attention as packed_attention
    from perfagent_loop.data.cache import CachedDataset as CachedDataset
    from perfagent_loop.data.cache import DiskCache as DiskCache
    from perfagent_loop.data.inspecting import inspect_batches as inspect_batches
    from perfagent_loop.data.length_batches import LengthBucketBatchSampler as LengthBucketBatchSampler
    from perfagent_loop.data.length_batches import PackedBatchSampler as PackedBatchSampler
    from perfagent_loop.data.length_batches import TokenBudgetBatchSampler as TokenBudgetBatchSampler
    from perfagent_loop.data.loader import loader_defaults as loader_defaults
    from perfagent_loop.data.loader import resumable_loader as resumable_loader
    from perfagent_loop.data.mapped import MappedLines as MappedLines
    from perfagent_loop.data.mapped import MappedTokens as MappedTokens
    from perfagent_loop.data.mapped import map_tokens as map_tokens
    from perfagent_loop.data.packed_stream import PackedStream as PackedStream
    from perfagent_loop.data.packing import pack as pack
    from perfagent_loop.data.packing import pack_stream as pack_stream
    from perfagent_loop.data.prefetch import Prefetcher as Prefetcher
    from perfagent_loop.ddp import comm_hook as comm_hook
    from perfagent_loop.ddp import ddp as ddp
    from perfagent_loop.deepspeed_config import zero_config as zero_config
    from perfagent_loop.estimates.memory import MemoryEstimate as MemoryEstimate
    from perfagent_loop.estimates.memory import estimate_memory as estimate_memory
    from perfagent_loop.fsdp import fsdp as fsdp
    from perfagent_loop.loop import Loop as Loop
    from perfagent_loop.loop import loop as loop
    from perfagent_loop.nonfinite import NanPolicy as NanPolicy
    from perfagent_loop.retry import retry as retry
    from perfagent_loop.search.batch_size import find_batch_size as find_batch_size
    from perfagent_loop.search.job import TuningJob as TuningJob
    from perfagent_loop.search.tuning import tune as tune
    from perfagent_loop.search.workers import find_num_workers as find_num_workers
    from perfagent_loop.split_on_oom import SplitOnOom as SplitOnOom
    from perfagent_loop.stepping import StepResult as StepResult

__version__ = "0.1.0"

_NAMES = {
    "perfagent.errors": "CheckpointError ConfigError PerfagentError ServerUnreachable Stopped WireError",
    "perfagent.media": "Audio Histogram Image Table",
    "perfagent.run": "Run",
    "perfagent.session": "alert attach finish init log",
    "perfagent_loop.checkpoint": "Checkpoint",
    "perfagent_loop.compute.activation": "checkpoint_activations",
    "perfagent_loop.compute.attention": "best_attention",
    "perfagent_loop.compute.attention_watch": "watch_attention",
    "perfagent_loop.compute.compiling": "compile_model",
    "perfagent_loop.compute.nccl": "nccl_preset",
    "perfagent_loop.compute.packed": "packed_attention",
    "perfagent_loop.data.cache": "CachedDataset DiskCache",
    "perfagent_loop.data.inspecting": "inspect_batches",
    "perfagent_loop.data.length_batches": "LengthBucketBatchSampler PackedBatchSampler TokenBudgetBatchSampler",
    "perfagent_loop.data.loader": "loader_defaults resumable_loader",
    "perfagent_loop.data.mapped": "MappedLines MappedTokens map_tokens",
    "perfagent_loop.data.packed_stream": "PackedStream",
    "perfagent_loop.data.packing": "pack pack_stream",
    "perfagent_loop.data.prefetch": "Prefetcher",
    "perfagent_loop.ddp": "comm_hook ddp",
    "perfagent_loop.deepspeed_config": "zero_config",
    "perfagent_loop.estimates.memory": "MemoryEstimate estimate_memory",
    "perfagent_loop.fsdp": "fsdp",
    "perfagent_loop.loop": "Loop loop",
    "perfagent_loop.nonfinite": "NanPolicy",
    "perfagent_loop.retry": "retry",
    "perfagent_loop.search.batch_size": "find_batch_size",
    "perfagent_loop.search.job": "TuningJob",
    "perfagent_loop.search.tuning": "tune",
    "perfagent_loop.search.workers": "find_num_workers",
    "perfagent_loop.split_on_oom": "SplitOnOom",
    "perfagent_loop.stepping": "StepResult",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_WHERE]  # noqa: PLE0604 - all are texts


class _Package(ModuleType):
    """This module's type. A property of it, because the submodule `perfagent.run` would else stand under that name."""

    @property
    def run(self) -> Run | None:
        """The current run; None where there is none."""
        session: Any = sys.modules.get("perfagent.session")
        current: Run | None = session.current() if session is not None else None
        return current

    @run.setter
    def run(self, _submodule: ModuleType) -> None:
        """The import system calls this when it has imported perfagent.run, which stays in sys.modules."""

    @property
    def config(self) -> Any:
        """That of the current run. Before there is one, what the script has put here, which the run gets."""
        if self.run is not None:
            return self.run.config
        try:
            return vars(self)["_config"]
        except KeyError:
            raise AttributeError("no run") from None  # __getattr__ says more

    @config.setter
    def config(self, entries: Any) -> None:
        from perfagent.calls.run_config import RunConfig

        if self.run is None:
            vars(self)["_config"] = given = RunConfig()
            given.update(entries)
        else:
            self.run.config.update(entries)

    def __reduce__(self) -> tuple[Any, ...]:
        """By its name, as cloudpickle pickles modules of the plain type: Ray, Dask and submitit send functions so."""
        return importlib.import_module, (__name__,)


sys.modules[__name__].__class__ = _Package


class _ByName:
    """A finder that waits for the first trainer which knows its loggers by name, tells it ours, and is gone. It finds
    nothing."""

    @classmethod
    def find_spec(cls, name: str, *_: Any) -> None:
        if name in _TRAINERS:
            try:
                sys.meta_path.remove(cls)
            except ValueError:  # another thread's import was first
                return
            _register()


def _register() -> None:
    importlib.import_module("perfagent.trackers.registry").register()


_TRAINERS = ("accelerate", "transformers")
if any(trainer in sys.modules for trainer in _TRAINERS):
    _register()
else:
    sys.meta_path.insert(0, _ByName)


def __getattr__(name: str) -> Any:
    if name == "config":
        raise AttributeError(
            "perfagent.config is that of the current run, and there is none: call attach() or init() first"
        )
    module = _WHERE.get(name)
    if module is None:
        if name.startswith("__"):  # the import system, pickle and notebooks ask for these
            raise AttributeError(f"module 'perfagent' has no attribute {name!r}")
        from perfagent.calls.other_trackers import of_module

        return of_module(name, __all__)
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
