"""Reports what filled the memory when an allocation failed, where the exception passes: counters of the allocator and the
sizes of tensors that are known by name. Allocates nothing on the device and waits for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfagent.boundary.guard import guarded
from perfagent.device import Backend, accelerator, backend_of
from perfagent.measure.tensor_storage import is_lazy, made_of, tensors_in
from perfagent.process.exit_reason import text_of
from perfagent.wire.evidence import MemoryEvidence

if TYPE_CHECKING:
    from torch import Tensor

    from perfagent.causes.watch import Watch

__all__ = ["forensics"]

_TRIED = re.compile(r"(?:[Tt]ried|[Uu]nable) to (?:allocate|mmap) ([\d.]+) ?([KMGT]i?B|bytes)")
_WORKER = re.compile(r"^Caught \w+ in DataLoader worker process (\d+)")
_ON_GPU = re.compile(r"\b(?:CUDA|HIP|CUDNN)(?:\b|_)")
_UNITS = {
    "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 1000, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_STATS = (
    "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current", "active_bytes.all.current",
    "inactive_split_bytes.all.current", "num_alloc_retries", "num_ooms",
)  # fmt: skip
_OF_PROCESS = {"VmRSS": "rss_bytes", "VmSize": "virtual_bytes", "VmHWM": "peak_rss_bytes"}
_OF_HOST = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
LAST_STEPS = 8
MOST_TEXT = 4000


@guarded
def forensics(watch: Watch, error: BaseException, number: int) -> None:
    """Reports a finding that explains `oom_observed`. On the thread that raised. number: of this run's failed allocations."""
    p, identity = watch.progress, watch.sender.identity
    step = p.completed + 1
    text = text_of(error)
    device = _device_of(error, text)
    evidence: MemoryEvidence = {
        "step": step, "device": device, "error": text[:MOST_TEXT], "where": _where(p), "number": number,
        "dtypes": _dtypes(watch),
    }  # fmt: skip
    if identity.world_size and identity.world_size > 1:
        evidence["world_size"] = identity.world_size
    if found := _TRIED.search(text):
        evidence["tried_bytes"] = int(float(found[1]) * _UNITS.get(found[2], 1))
    if worker := _WORKER.search(text):  # torch raises it again here, with the worker's traceback as its text
        evidence["worker"] = int(worker[1])
    kind, _, place = device.partition(":")
    backend = backend_of(kind)
    index = int(place) if place else backend.current_index() if backend.in_use() else None
    categories = _categories(watch, kind, index)
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
    largest_first = sorted(categories.items(), key=lambda item: -item[1])
    evidence["categories"] = {name: held for name, held in largest_first if held}
    watch.report(
        "oom_observed", ["oom_observed"], step, evidence, lambda: {"last_steps": watch.history()[-LAST_STEPS:]}
    )


def _device_of(error: BaseException, text: str) -> str:
    kind = accelerator().kind
    other = re.match(rf"(MPS|XPU|{re.escape(kind)})\b", text, re.IGNORECASE)
    number = re.search(r"[GN]PU (\d+)", text)
    if other or number or type(error).__name__ == "OutOfMemoryError" or _ON_GPU.search(text):
        return (other[1].lower() if other else kind) + (f":{number[1]}" if number else "")
    return "cpu"


def _where(p: Any) -> str:
    """The phase of the step in which it happened."""
    if p.backward_depth:
        return "backward"
    if p.entered or p.scaler_depth:
        return "optimizer"
    return "forward" if p.opened else "between steps"


def _categories(watch: Watch, kind: str, index: int | None) -> dict[str, int]:
    """Bytes on the device by category. Shared storage counts once."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    seen: set[int] = set()

    def bytes_of(tensors: Iterable[Tensor]) -> int:
        total = 0
        for part in (part for tensor in tensors for part in _stored(tensor)):
            storage = part.untyped_storage()
            is_here = part.device.type == kind and index in (None, part.device.index)
            if is_here and storage.data_ptr() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    p = watch.progress
    optimizers = p.selection.all()
    model = watch.model()
    weights: list[Tensor] = list(model.parameters()) if model is not None else []
    weights += [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
    state = [value for one in optimizers for entry in one.state.values() for value in tensors_in(entry)]
    return {
        "parameters": bytes_of(weights),
        "gradients": bytes_of(weight.grad for weight in weights if weight.grad is not None),
        "optimizer_state": bytes_of(value for value in state if isinstance(value, torch.Tensor)),
        "buffers": bytes_of(model.buffers()) if model is not None else 0,
    }


def _stored(tensor: Tensor) -> list[Tensor]:
    """The parts that have memory of their own: those of a sparse gradient are its numbers and their places."""
    parts: list[Tensor] = []
    for part in () if is_lazy(tensor) else made_of(tensor):
        parts += [part._indices(), part._values()] if part.is_sparse else [part]
    return [part for part in parts if part.layout is sys.modules["torch"].strided]


def _dtypes(watch: Watch) -> list[str]:
    model = watch.model()
    return sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}) if model is not None else []


def _allocator(backend: Backend, index: int | None) -> dict[str, int]:
    stats = backend.memory_stats(index) if index is not None and backend.in_use() else {}
    values: dict[str, Any] = {
        name: functools.reduce(lambda held, part: held.get(part, {}), name.split("."), stats) for name in _STATS
    }
    return {name: int(value) for name, value in values.items() if value != {}}


def _segments(backend: Backend, index: int | None) -> list[dict[str, int]]:
    """The allocator's largest segments and the largest hole in each: that none is large enough is what fragmentation
    means."""
    segments = sorted(backend.segments(index or 0), key=lambda one: -int(one["total_size"]))
    free = ([int(block["size"]) for block in one["blocks"] if block["state"] == "inactive"] for one in segments)
    return [
        {
            "total_bytes": int(one["total_size"]), "allocated_bytes": int(one["allocated_size"]),
            "largest_free_bytes": max(holes, default=0),
        }
        for one, holes in zip(segments[:8], free, strict=False)
    ]  # fmt: skip


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
