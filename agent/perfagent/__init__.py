"""perfagent: a training-job monitor. `perfagent.attach(model)` in a training script, and the rest shows by itself.

Importing this package imports nothing heavy and starts nothing; each public name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfagent.errors import CheckpointError as CheckpointError
    from perfagent.errors import ConfigError as ConfigError
    from perfagent.errors import PerfagentError as PerfagentError
    from perfagent.errors import ServerUnreachable as ServerUnreachable
    from perfagent.errors import WireError as WireError
    from perfagent.session import Run as Run
    from perfagent.session import alert as alert
    from perfagent.session import attach as attach
    from perfagent.session import finish as finish
    from perfagent.session import init as init
    from perfagent.session import log as log
    from perfagent.training.checkpoint import Checkpoint as Checkpoint
    from perfagent.training.compute.activation import checkpoint_activations as checkpoint_activations
    from perfagent.training.compute.attention import best_attention as best_attention
    from perfagent.training.compute.packed import packed_attention as packed_attention
    from perfagent.training.ddp import comm_hook as comm_hook
    from perfagent.training.ddp import ddp as ddp
    from perfagent.training.estimates.memory import MemoryEstimate as MemoryEstimate
    from perfagent.training.estimates.memory import estimate_memory as estimate_memory
    from perfagent.training.finding.batch_size import find_batch_size as find_batch_size
    from perfagent.training.finding.job import TuningJob as TuningJob
    from perfagent.training.finding.tuning import tune as tune
    from perfagent.training.finding.workers import find_num_workers as find_num_workers
    from perfagent.training.fsdp import fsdp as fsdp
    from perfagent.training.loop import Loop as Loop
    from perfagent.training.loop import loop as loop
    from perfagent.training.nonfinite import NanPolicy as NanPolicy
    from perfagent.training.retry import retry as retry
    from perfagent.training.split_on_oom import SplitOnOom as SplitOnOom
    from perfagent.training.stepping import StepResult as StepResult
    from perfagent.training.zero import zero_config as zero_config

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Loop",
    "MemoryEstimate",
    "NanPolicy",
    "PerfagentError",
    "Run",
    "ServerUnreachable",
    "SplitOnOom",
    "StepResult",
    "TuningJob",
    "WireError",
    "__version__",
    "alert",
    "attach",
    "best_attention",
    "checkpoint_activations",
    "comm_hook",
    "ddp",
    "estimate_memory",
    "find_batch_size",
    "find_num_workers",
    "finish",
    "fsdp",
    "init",
    "log",
    "loop",
    "packed_attention",
    "retry",
    "tune",
    "zero_config",
]

_WHERE = {
    "CheckpointError": "perfagent.errors",
    "ConfigError": "perfagent.errors",
    "PerfagentError": "perfagent.errors",
    "ServerUnreachable": "perfagent.errors",
    "WireError": "perfagent.errors",
    "Run": "perfagent.session",
    "alert": "perfagent.session",
    "attach": "perfagent.session",
    "finish": "perfagent.session",
    "init": "perfagent.session",
    "log": "perfagent.session",
    "Checkpoint": "perfagent.training.checkpoint",
    "best_attention": "perfagent.training.compute.attention",
    "checkpoint_activations": "perfagent.training.compute.activation",
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
    "zero_config": "perfagent.training.zero",
    "MemoryEstimate": "perfagent.training.estimates.memory",
    "estimate_memory": "perfagent.training.estimates.memory",
    "find_batch_size": "perfagent.training.finding.batch_size",
    "find_num_workers": "perfagent.training.finding.workers",
    "TuningJob": "perfagent.training.finding.job",
    "tune": "perfagent.training.finding.tuning",
}


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'perfagent' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
