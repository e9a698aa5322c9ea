"""perfagent: a training-job monitor. `perfagent.attach(model)` in a training script, and the rest shows by itself.

Importing this package imports nothing heavy and starts nothing; each public name is resolved when it is first used.
`config` and `run` are those of the current run, for scripts that say `import perfagent as wandb`; what else these call
is in drop_in.py.
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
    from perfagent.training.checkpoint import Checkpoint as Checkpoint
    from perfagent.training.compute.activation import checkpoint_activations as checkpoint_activations
    from perfagent.training.compute.attention import best_attention as best_attention
    from perfagent.training.compute.attention_watch import watch_attention as watch_attention
    from perfagent.training.compute.compiling import compile_model as compile_model
    from perfagent.training.compute.nccl import nccl_preset as nccl_preset
    from perfagent.training.compute.packed import packed_attention as packed_attention
    from perfagent.training.data.buckets import LengthBucketBatchSampler as LengthBucketBatchSampler
    from perfagent.training.data.cache import CachedDataset as CachedDataset
    from perfagent.training.data.cache import DiskCache as DiskCache
    from perfagent.training.data.inspecting import inspect_batches as inspect_batches
    from perfagent.training.data.loader import loader_defaults as loader_defaults
    from perfagent.training.data.loader import resumable_loader as resumable_loader
    from perfagent.training.data.mapped import MappedLines as MappedLines
    from perfagent.training.data.mapped import MappedTokens as MappedTokens
    from perfagent.training.data.mapped import map_tokens as map_tokens
    from perfagent.training.data.packed_batches import PackedBatchSampler as PackedBatchSampler
    from perfagent.training.data.packed_stream import PackedStream as PackedStream
    from perfagent.training.data.packing import pack as pack
    from perfagent.training.data.packing import pack_stream as pack_stream
    from perfagent.training.data.prefetch import Prefetcher as Prefetcher
    from perfagent.training.data.token_budget import TokenBudgetBatchSampler as TokenBudgetBatchSampler
    from perfagent.training.ddp import comm_hook as comm_hook
    from perfagent.training.ddp import ddp as ddp
    from perfagent.training.deepspeed_config import zero_config as zero_config
    from perfagent.training.estimates.memory import MemoryEstimate as MemoryEstimate
    from perfagent.training.estimates.memory import estimate_memory as estimate_memory
    from perfagent.training.fsdp import fsdp as fsdp
    from perfagent.training.loop import Loop as Loop
    from perfagent.training.loop import loop as loop
    from perfagent.training.nonfinite import NanPolicy as NanPolicy
    from perfagent.training.retry import retry as retry
    from perfagent.training.search.batch_size import find_batch_size as find_batch_size
    from perfagent.training.search.job import TuningJob as TuningJob
    from perfagent.training.search.tuning import tune as tune
    from perfagent.training.search.workers import find_num_workers as find_num_workers
    from perfagent.training.split_on_oom import SplitOnOom as SplitOnOom
    from perfagent.training.stepping import StepResult as StepResult

__version__ = "0.1.0"

__all__ = [
    "Audio",
    "CachedDataset",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DiskCache",
    "Histogram",
    "Image",
    "LengthBucketBatchSampler",
    "Loop",
    "MappedLines",
    "MappedTokens",
    "MemoryEstimate",
    "NanPolicy",
    "PackedBatchSampler",
    "PackedStream",
    "PerfagentError",
    "Prefetcher",
    "Run",
    "ServerUnreachable",
    "SplitOnOom",
    "StepResult",
    "Stopped",
    "Table",
    "TokenBudgetBatchSampler",
    "TuningJob",
    "WireError",
    "__version__",
    "alert",
    "attach",
    "best_attention",
    "checkpoint_activations",
    "comm_hook",
    "compile_model",
    "ddp",
    "estimate_memory",
    "find_batch_size",
    "find_num_workers",
    "finish",
    "fsdp",
    "init",
    "inspect_batches",
    "loader_defaults",
    "log",
    "loop",
    "map_tokens",
    "nccl_preset",
    "pack",
    "pack_stream",
    "packed_attention",
    "resumable_loader",
    "retry",
    "tune",
    "watch_attention",
    "zero_config",
]

_WHERE = {
    "CheckpointError": "perfagent.errors",
    "ConfigError": "perfagent.errors",
    "PerfagentError": "perfagent.errors",
    "ServerUnreachable": "perfagent.errors",
    "Stopped": "perfagent.errors",
    "WireError": "perfagent.errors",
    "Audio": "perfagent.media",
    "Histogram": "perfagent.media",
    "Image": "perfagent.media",
    "Table": "perfagent.media",
    "Run": "perfagent.run",
    "alert": "perfagent.session",
    "attach": "perfagent.session",
    "finish": "perfagent.session",
    "init": "perfagent.session",
    "log": "perfagent.session",
    "Checkpoint": "perfagent.training.checkpoint",
    "best_attention": "perfagent.training.compute.attention",
    "checkpoint_activations": "perfagent.training.compute.activation",
    "compile_model": "perfagent.training.compute.compiling",
    "nccl_preset": "perfagent.training.compute.nccl",
    "watch_attention": "perfagent.training.compute.attention_watch",
    "packed_attention": "perfagent.training.compute.packed",
    "NanPolicy": "perfagent.training.nonfinite",
    "SplitOnOom": "perfagent.training.split_on_oom",
    "retry": "perfagent.training.retry",
    "loop": "perfagent.training.loop",
    "Loop": "perfagent.training.loop",
    "StepResult": "perfagent.training.stepping",
    "fsdp": "perfagent.training.fsdp",
    "ddp": "perfagent.training.ddp",
    "comm_hook": "perfagent.training.ddp",
    "zero_config": "perfagent.training.deepspeed_config",
    "MemoryEstimate": "perfagent.training.estimates.memory",
    "estimate_memory": "perfagent.training.estimates.memory",
    "find_batch_size": "perfagent.training.search.batch_size",
    "find_num_workers": "perfagent.training.search.workers",
    "TuningJob": "perfagent.training.search.job",
    "tune": "perfagent.training.search.tuning",
    "CachedDataset": "perfagent.training.data.cache",
    "DiskCache": "perfagent.training.data.cache",
    "LengthBucketBatchSampler": "perfagent.training.data.buckets",
    "MappedLines": "perfagent.training.data.mapped",
    "MappedTokens": "perfagent.training.data.mapped",
    "PackedBatchSampler": "perfagent.training.data.packed_batches",
    "PackedStream": "perfagent.training.data.packed_stream",
    "Prefetcher": "perfagent.training.data.prefetch",
    "TokenBudgetBatchSampler": "perfagent.training.data.token_budget",
    "inspect_batches": "perfagent.training.data.inspecting",
    "loader_defaults": "perfagent.training.data.loader",
    "map_tokens": "perfagent.training.data.mapped",
    "pack": "perfagent.training.data.packing",
    "pack_stream": "perfagent.training.data.packing",
    "resumable_loader": "perfagent.training.data.loader",
}


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
        from perfagent.run_config import RunConfig

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
    importlib.import_module("perfagent.integrations.registry").register()


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
        from perfagent.drop_in import of_module

        return of_module(name, __all__)
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
