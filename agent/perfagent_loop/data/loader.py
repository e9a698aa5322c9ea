"""What a DataLoader is given on this machine, and one that goes on in the middle of an epoch.

Cores are those that this process may use (its affinity and its control group's quota, which os.cpu_count() knows
nothing of), shared by the ranks of the node."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from perfagent.errors import ConfigError
from perfagent.samplers.cgroup import find
from perfagent_loop.checks import check_count, device_named

__all__ = ["LoaderSettings", "loader_defaults", "resumable_loader", "usable_cores"]

_MOST_WORKERS = 8
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where workers hand over their batches
_SHARED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """arguments: for DataLoader(dataset, **settings.arguments). why: a line for each that was decided."""

    arguments: dict[str, Any]
    why: tuple[str, ...]

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return "\n".join([given, *(f"  {line}" for line in self.why)])


def loader_defaults(
    dataset: Any = None, *, batch_bytes: int | None = None, ranks_on_node: int | None = None, device: Any = None
) -> LoaderSettings:
    """Chooses num_workers, pin_memory, persistent_workers and prefetch_factor for this machine.

    `DataLoader(dataset, **loader_defaults(dataset).arguments)`. The number of workers is the cores of this rank minus
    one, at least 1 and at most 8. This is a starting point: `find_num_workers` measures.

    Args:
        dataset: The dataset. Tensors in memory need no workers.
        batch_bytes: The size of a batch. The batches of all workers must fit into half of the shared memory, which is
            often 64 MB in containers.
        ranks_on_node: Training processes on this machine; LOCAL_WORLD_SIZE by default.
        device: The device of the training, as torch names it; CUDA by default if there is any.

    Returns:
        Settings with `arguments` for a DataLoader, and `why`, one line for each choice.
    """
    words = os.environ.get("LOCAL_WORLD_SIZE", "1").strip()
    ranks = ranks_on_node if ranks_on_node is not None else max(1, int(words)) if words.isdigit() else 1
    check_count("ranks_on_node", ranks, "a number of training processes on this machine")
    check_count("batch_bytes", batch_bytes, "the size of one batch", or_none=True)
    cuda = torch.cuda.is_available() if device is None else device_named(device).type == "cuda"
    cores = usable_cores()
    mine = cores / ranks
    why = []
    if isinstance(dataset, TensorDataset):
        workers = 0
        why.append("no workers: the dataset's tensors are in memory, and handing them over costs more than taking them")
    else:
        workers = max(1, min(_MOST_WORKERS, int(mine) - 1))
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        why.append(f"{workers} worker{'s' if workers > 1 else ''}: {cores:g} cores may be used here{shared}")
    if isinstance(dataset, IterableDataset) and workers > 1:
        why.append("the dataset is a stream: it must share itself among workers (get_worker_info)")
    prefetch = 2
    if workers and batch_bytes is not None:
        workers, prefetch = _within_shared_memory(workers, prefetch, batch_bytes, ranks, why)
    arguments: dict[str, Any] = {"num_workers": workers, "pin_memory": cuda}
    why.append("pinned memory: copies to the GPU do not wait" if cuda else "no pinned memory: nothing goes to a GPU")
    if workers:
        arguments |= {"persistent_workers": True, "prefetch_factor": prefetch}
        why.append(f"workers stay for all epochs, and prepare {prefetch} batches each")
    return LoaderSettings(arguments, tuple(why))


def usable_cores() -> float:
    """Cores that this process may use: the smaller of its affinity and its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = find()
    quota = None if group is None else group.cores
    return float(allowed) if quota is None else max(1.0, min(float(allowed), quota))


def resumable_loader(dataset: Dataset[Any], **arguments: Any) -> DataLoader[Any]:
    """torchdata's StatefulDataLoader with the settings of `loader_defaults`.

    It knows where each worker is, so that a checkpoint of `perfagent.loop` continues after the last batch that was
    trained on, also with iterable datasets that have `state_dict()` and `load_state_dict()`. A plain DataLoader over a
    map-style dataset needs none of this. Resume with the same `num_workers`.

    Args:
        dataset: Any dataset.
        **arguments: Arguments of a DataLoader. They override the defaults.

    Raises:
        ConfigError: torchdata is not installed.
    """
    if importlib.util.find_spec("torchdata") is None:
        raise ConfigError("an iterable dataset resumes within an epoch by torchdata alone (pip install torchdata)")
    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    defaults = loader_defaults(dataset).arguments
    if not arguments.get("num_workers", defaults["num_workers"]):
        defaults = {name: defaults[name] for name in ("num_workers", "pin_memory")}
    settings = defaults | arguments
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 still calls it
        loader: DataLoader[Any] = stateful(dataset, **settings)
    return loader


def _within_shared_memory(workers: int, prefetch: int, batch_bytes: int, ranks: int, why: list[str]) -> tuple[int, int]:
    try:
        space = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return workers, prefetch
    free = space.f_bavail * space.f_frsize
    fits = int(_SHARED_SHARE * free / ranks / max(1, batch_bytes))
    if workers * prefetch <= fits:
        return workers, prefetch
    prefetch = max(1, min(prefetch, fits // workers))
    workers = max(1, min(workers, fits // prefetch))
    why.append(
        f"{workers} x {prefetch} batches of {batch_bytes / 2**20:.1f} MiB on their way: the shared memory has "
        f"{free / 2**20:.0f} MiB left (docker run --shm-size gives more)"
    )
    return workers, prefetch
