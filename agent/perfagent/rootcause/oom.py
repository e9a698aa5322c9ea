"""Reports what filled the memory when an allocation failed. It looks once, where the exception passes.

Reads counters of the allocator and the sizes of tensors that are known by name; it allocates nothing on the device and
waits for nothing. The exception goes on unchanged: this module only looks.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.end_reason import text_of
from perfagent.rootcause.evidence import Evidence
from perfagent.signals.tensor_storage import every_optimizer, is_lazy, made_of, tensors_in
from perfagent.wire.evidence import MemoryEvidence

if TYPE_CHECKING:
    from perfagent.rootcause.investigator import Investigator

__all__ = ["forensics"]

_TRIED = re.compile(r"(?:[Tt]ried|[Uu]nable) to (?:allocate|mmap) ([\d.]+) ?([KMGT]i?B|bytes)")
_WORKER = re.compile(r"^Caught \w+ in DataLoader worker process (\d+)")
_UNITS = {
    "bytes": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 1000,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_STATS = (
    "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current", "active_bytes.all.current",
    "inactive_split_bytes.all.current", "num_alloc_retries", "num_ooms",
)  # fmt: skip
_OF_PROCESS = {"VmRSS": "rss_bytes", "VmSize": "virtual_bytes", "VmHWM": "peak_rss_bytes"}
_OF_HOST = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
LAST_STEPS = 8
MOST_TEXT = 4000


def forensics(investigator: Investigator, error: BaseException, number: int) -> None:
    """Reports what filled the memory, as a finding that explains `oom_observed`. On the thread that raised.

    number: how many allocations of this run have failed so far, with this one.
    """
    p, identity = investigator.progress, investigator.sender.identity
    step = p.completed + 1
    text = text_of(error)
    device = _device_of(error, text)
    evidence: MemoryEvidence = {
        "step": step, "device": device, "error": text[:MOST_TEXT], "where": _where(p), "number": number,
        "dtypes": _dtypes(investigator),
    }  # fmt: skip
    if identity.world_size and identity.world_size > 1:
        evidence["world_size"] = identity.world_size
    tried = _tried(text)
    if tried is not None:
        evidence["tried_bytes"] = tried
    worker = _WORKER.search(text)
    if worker is not None:  # torch raises it again here, with the worker's traceback as its text
        evidence["worker"] = int(worker[1])
    categories = _categories(investigator, device)
    allocator = _allocator(device) if device.startswith("cuda") else {}
    if allocator:
        total = allocator["allocated_bytes.all.current"]
        known = sum(categories.values())
        if total > known:
            categories["activations_and_other"] = total - known
        evidence["allocator"], evidence["capacity_bytes"] = allocator, _capacity(device)
        evidence["largest_segments"] = _segments(device)
    else:  # an MPS device has its memory from the host
        evidence["host"] = _host()
    evidence["categories"] = {
        name: held for name, held in sorted(categories.items(), key=lambda item: -item[1]) if held
    }
    data = {
        "rule": "oom_observed", "explains": ["oom_observed"], "severity": "critical", "since_step": step,
        "evidence": Evidence({**evidence}, lambda: _last_steps(investigator)),
    }  # fmt: skip
    investigator.sender.event("finding", data, step=step)


@guarded
def _last_steps(investigator: Investigator) -> dict[str, Any]:
    investigator.read_rows()
    return {"last_steps": investigator.history()[-LAST_STEPS:]}


def _device_of(error: BaseException, text: str) -> str:
    other = re.match(r"(MPS|XPU)\b", text)
    number = re.search(r"GPU (\d+)", text)
    if other:
        return other[1].lower() + (f":{number[1]}" if number else "")
    if number:
        return f"cuda:{number[1]}"
    if type(error).__name__ == "OutOfMemoryError" or re.search("CUDA|HIP|CUDNN", text):
        return "cuda"
    return "cpu"


def _where(p: Any) -> str:
    """The phase of the step in which it happened."""
    if p.backward_depth:
        return "backward"
    if p.entered or p.scaler_depth:
        return "optimizer"
    return "forward" if p.opened else "between steps"


def _tried(text: str) -> int | None:
    """Bytes of the allocation that failed, from torch's message."""
    found = _TRIED.search(text) or re.search(r"tried to allocate (\d+) (bytes)", text)
    if found is None:
        return None
    return int(float(found[1]) * _UNITS.get(found[2], 1))


def _categories(investigator: Investigator, device: str) -> dict[str, int]:
    """Bytes by what they are for, of what is known by name. Storages that are shared count once; those elsewhere do not
    count."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    kind, _, number = device.partition(":")
    index = int(number) if number else _ordinal(device) if kind == "cuda" and torch.cuda.is_initialized() else None
    seen: set[int] = set()

    def bytes_of(tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            for part in () if is_lazy(tensor) else _stored(tensor):
                if part.device.type != kind or (index is not None and part.device.index != index):
                    continue
                storage = part.untyped_storage()
                if storage.data_ptr() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
        return total

    p = investigator.progress
    primary = p.selection.primary() if p.selection.primary is not None else None
    optimizers = every_optimizer(p, primary) if primary is not None else []
    model = investigator.model()
    weights: list[Any] = list(model.parameters()) if model is not None else []
    weights += [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
    state = [value for one in optimizers for entry in one.state.values() for value in tensors_in(entry)]
    return {
        "parameters": bytes_of(weights),
        "gradients": bytes_of(weight.grad for weight in weights if weight.grad is not None),
        "optimizer_state": bytes_of(value for value in state if isinstance(value, torch.Tensor)),
        "buffers": bytes_of(model.buffers()) if model is not None else 0,
    }


def _stored(tensor: Any) -> list[Any]:
    """The parts that have memory of their own: those of a sparse gradient are its numbers and their places."""
    torch = sys.modules["torch"]
    parts: list[Any] = []
    for part in made_of(tensor):
        if part.layout is torch.sparse_coo:
            parts += [part._indices(), part._values()]
        elif part.layout is torch.strided:
            parts.append(part)
    return parts


def _dtypes(investigator: Investigator) -> list[str]:
    model = investigator.model()
    return sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}) if model is not None else []


def _ordinal(device: str) -> int:
    _, _, number = device.partition(":")
    return int(number) if number else int(sys.modules["torch"].cuda.current_device())


def _allocator(device: str) -> dict[str, int]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats(_ordinal(device))
    return {name: int(stats[name]) for name in _STATS if name in stats}


def _capacity(device: str) -> int | None:
    return int(sys.modules["torch"].cuda.get_device_properties(_ordinal(device)).total_memory)


def _segments(device: str) -> list[dict[str, int]]:
    """The allocator's largest segments and the largest hole in each: that none is large enough is what fragmentation
    means."""
    torch = sys.modules["torch"]
    snapshot = torch.cuda.memory_snapshot
    if "include_traces" not in inspect.signature(snapshot).parameters:
        return []
    # traces of every allocation, where the script records them, would take seconds and GiB
    segments = [one for one in snapshot(include_traces=False) if one.get("device") == _ordinal(device)]
    segments.sort(key=lambda one: -int(one["total_size"]))
    return [
        {
            "total_bytes": int(one["total_size"]),
            "allocated_bytes": int(one["allocated_size"]),
            "largest_free_bytes": max(
                (int(block["size"]) for block in one["blocks"] if block["state"] == "inactive"), default=0
            ),
        }
        for one in segments[:8]
    ]


def _host() -> dict[str, int]:
    """Memory of this process, of the host and of its control group, as far as they can be read."""
    from perfagent.samplers import cgroup

    found: dict[str, int] = {}
    for path, names in ((Path("/proc/self/status"), _OF_PROCESS), (Path("/proc/meminfo"), _OF_HOST)):
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:  # no Linux
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name in names:
                found[names[name]] = 1024 * int(value.split()[0])
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # no Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            found["address_limit_bytes"] = limit
    group = cgroup.find()
    if group is not None and group.limit_bytes is not None:
        found["limit_bytes"] = group.limit_bytes
    return found
