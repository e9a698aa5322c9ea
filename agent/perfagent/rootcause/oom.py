"""Reports what filled the memory when an allocation failed. It looks once, where the exception passes.

Reads counters of the allocator and the sizes of tensors that are known by name; it allocates nothing on the device and
waits for nothing. The exception goes on unchanged: this module only looks.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.device import Backend, accelerator, backend_of
from perfagent.process.exit_reason import text_of
from perfagent.rootcause.evidence import Evidence
from perfagent.signals.tensor_storage import is_lazy, made_of, tensors_in
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
    kind, _, place = device.partition(":")
    backend = backend_of(kind)
    index = int(place) if place else backend.current_index() if backend.in_use() else None
    categories = _categories(investigator, kind, index)
    allocator = _allocator(backend, index)
    if allocator:
        total = allocator["allocated_bytes.all.current"]
        known = sum(categories.values())
        if total > known:
            categories["activations_and_other"] = total - known
        evidence["allocator"], evidence["largest_segments"] = allocator, _segments(backend, index)
        if capacity := backend.property(index or 0, "total_memory"):
            evidence["capacity_bytes"] = int(capacity)
    if not allocator or kind == "mps":  # an MPS device has its memory from the host
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
    kind = accelerator().kind
    other = re.match(rf"(MPS|XPU|{re.escape(kind)})\b", text, re.IGNORECASE)
    number = re.search(r"[GN]PU (\d+)", text)
    if other or number or type(error).__name__ == "OutOfMemoryError" or re.search("CUDA|HIP|CUDNN", text):
        return (other[1].lower() if other else kind) + (f":{number[1]}" if number else "")
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


def _categories(investigator: Investigator, kind: str, index: int | None) -> dict[str, int]:
    """Bytes by what they are for, of what is known by name. Storages that are shared count once; those elsewhere do not
    count."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
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
    optimizers = p.selection.all()
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


def _allocator(backend: Backend, index: int | None) -> dict[str, int]:
    stats = backend.memory_stats(index) if index is not None and backend.in_use() else {}
    found: dict[str, int] = {}
    for name in _STATS:
        value: Any = stats
        for part in name.split("."):
            value = value.get(part, {})
        if value != {}:
            found[name] = int(value)
    return found


def _segments(backend: Backend, index: int | None) -> list[dict[str, int]]:
    """The allocator's largest segments and the largest hole in each: that none is large enough is what fragmentation
    means."""
    segments = sorted(backend.segments(index or 0), key=lambda one: -int(one["total_size"]))
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
