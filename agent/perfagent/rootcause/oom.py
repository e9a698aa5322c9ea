"""Reports what filled the memory when an allocation failed, and what would make room. It looks once, where the
exception passes.

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

from perfagent.end_reason import text_of
from perfagent.rootcause.containment import contained
from perfagent.rootcause.evidence import Evidence
from perfagent.signals.tensor_storage import every_optimizer, is_lazy, made_of, tensors_in
from perfagent.wire.quantities import size

if TYPE_CHECKING:
    from perfagent.rootcause.investigator import Investigator

__all__ = ["forensics", "remedies"]

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
_NEARLY = 0.9
"""Of the limit of addresses: torch's message may say less than its allocator asked for."""
_OF_WORKERS = (
    "Look at what the dataset keeps and what one sample takes: read it piece by piece (memory-mapped files), keep it in arrays, "
    "which workers share, instead of lists of Python objects.",
    "Use fewer DataLoader workers (num_workers) and a lower prefetch_factor.",
    "Halve the batch size and double gradient accumulation.",
)
_KEPT_OF_EVERY_STEP = (
    "Look whether process/rss_bytes rose step by step: then something is kept of every step, such as a list of losses or outputs "
    "with their graphs (keep loss.item() instead), and nothing below helps."
)
LAST_STEPS = 8
MOST_TEXT = 4000


def forensics(investigator: Investigator, error: BaseException, number: int) -> None:
    """Tells what filled the memory, as a finding that explains `oom_observed`. On the thread that raised.

    number: how many allocations of this run have failed so far, with this one.
    """
    p = investigator.progress
    step = p.completed + 1
    text = text_of(error)
    device = _device_of(error, text)
    evidence: dict[str, Any] = {
        "step": step,
        "device": device,
        "error": text[:MOST_TEXT],
        "where": _where(p),
        "number": number,
    }
    tried = _tried(text)
    if tried is not None:
        evidence["tried_bytes"] = tried
    worker = _WORKER.search(text)
    if worker is not None:  # torch raises it again here, with the worker's traceback as its text
        evidence["worker"] = int(worker[1])
    categories = _categories(investigator, device)
    allocator = _allocator(device) if device.startswith("cuda") else {}
    host = _host() if not allocator else {}  # an MPS device has its memory from the host
    if allocator:
        total = allocator["allocated_bytes.all.current"]
        known = sum(categories.values())
        if total > known:
            categories["activations_and_other"] = total - known
        evidence |= {"allocator": allocator, "capacity_bytes": _capacity(device), "largest_segments": _segments(device)}
    if host:
        evidence["host"] = host
    evidence["categories"] = {
        name: held for name, held in sorted(categories.items(), key=lambda item: -item[1]) if held
    }
    evidence["remedies"] = remedies(
        evidence["categories"], dtypes=_dtypes(investigator), world_size=investigator.sender.identity.world_size,
        unused=allocator.get("reserved_bytes.all.current", 0) - allocator.get("allocated_bytes.all.current", 0), tried=tried,
        on_device=device.startswith("cuda"), capacity=evidence.get("capacity_bytes") or host.get("total_bytes"),
        address_limit=_is_address_limit(host, tried), in_worker=worker is not None,
    )  # fmt: skip
    data = {
        "rule": "oom_observed", "explains": ["oom_observed"], "severity": "critical", "message": _sentence(evidence),
        "since_step": step, "evidence": Evidence(evidence, lambda: _last_steps(investigator)), "fix": _fix(evidence["remedies"]),
    }  # fmt: skip
    investigator.sender.event("finding", data, step=step)


@contained
def _last_steps(investigator: Investigator) -> dict[str, Any]:
    investigator.read_rows()
    return {"last_steps": investigator.history()[-LAST_STEPS:]}


def remedies(
    categories: dict[str, int], *, dtypes: Iterable[str] = (), world_size: int = 1, unused: int = 0, tried: int | None = None,
    on_device: bool = True, capacity: int | None = None, address_limit: bool = False, in_worker: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """[{"do", "saves_bytes"?, "enough"?}]: what is enough for the allocation that failed first, and of equals the least change.

    Savings are estimates from the categories: halving the batch halves the activations; bf16 halves those of a float32
    model; checkpointing keeps about a third; AdamW in 8 bits a quarter of its state; FSDP or ZeRO an n-th of
    parameters, gradients and state. saves_bytes is absent where nothing is known to estimate from. capacity: all memory
    that there is; address_limit:
    the process is held to fewer addresses; in_worker: a DataLoader's worker asked for it, so that nothing of the model
    helps.
    """
    activations, state = categories.get("activations_and_other", 0), categories.get("optimizer_state", 0)
    parameters, gradients = categories.get("parameters", 0), categories.get("gradients", 0)
    plans: list[tuple[str, int | None]] = []
    if tried is not None and capacity is not None and tried > capacity:
        plans.append((f"Look at the line that asks for {size(tried)}: in all there are {size(capacity)}.", None))
    if address_limit:
        plans.append(
            ("Lift the limit of addresses (ulimit -v unlimited): memory that is only reserved counts towards it.", None)
        )
    if on_device and unused > 0.1 * (sum(categories.values()) or 1):
        pieces = "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: what is reserved is in pieces that fit nothing."
        plans.append((pieces, unused))
    if in_worker:
        plans += [(do, None) for do in _OF_WORKERS]
        return [{"do": do} for do, _ in plans]
    if not on_device and not (tried is not None and capacity is not None and tried > capacity):
        plans.append((_KEPT_OF_EVERY_STEP, None))
    plans.append(("Halve the batch size and double gradient accumulation.", activations // 2 if activations else None))
    if not dtypes or "float32" in dtypes:
        plans.append(("Train in mixed precision (torch.autocast, bf16).", activations // 2 if activations else None))
    kept_third = 2 * activations // 3 if activations else None
    plans.append(("Checkpoint activations (torch.utils.checkpoint) in the repeated blocks.", kept_third))
    if world_size > 1:
        shared = (parameters + gradients + state) * (world_size - 1) // world_size
        over = f"Shard parameters, gradients and optimizer state over the {world_size} ranks (FSDP2, ZeRO-3)."
        plans.append((over, shared or None))
    if state:
        plans.append(
            ("Keep the optimizer's state in 8 bits (bitsandbytes), or use one with less state.", 3 * state // 4)
        )
    found = []
    for do, saves in plans:
        plan: dict[str, Any] = {"do": do}
        if saves:
            plan["saves_bytes"] = int(saves)
            if tried is not None:
                plan["enough"] = saves >= tried
        found.append(plan)
    return sorted(found, key=lambda plan: not plan.get("enough", False))


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
    primary = p.primary() if p.primary is not None else None
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


def _dtypes(investigator: Investigator) -> set[str]:
    model = investigator.model()
    return {str(p.dtype).removeprefix("torch.") for p in model.parameters()} if model is not None else set()


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


def _sentence(evidence: dict[str, Any]) -> str:
    """Ends the rule's message, which says that memory ran out."""
    device, tried = evidence["device"], evidence.get("tried_bytes")
    asked = f"an allocation of {size(tried)} of" if tried is not None else "an allocation of"
    kind = "host memory" if device == "cpu" else "GPU memory"
    where = f" in {evidence['where']}" if evidence["where"] != "between steps" else ""
    if "worker" in evidence:
        where = f" in DataLoader worker {evidence['worker']}"
    taken = _taken(evidence.get("host", {}), tried, "the training process" if "worker" in evidence else "this process")
    taken = taken if device == "cpu" else ""
    holds = ", ".join(
        f"{name.replace('_', ' ')} {size(held)}" for name, held in list(evidence["categories"].items())[:4]
    )
    named = (f"; of it {holds}" if taken else f"; {kind} holds {holds}") if holds else ""
    return f"In step {evidence['step']} {asked} {kind} failed{where}{taken}{named}."


def _is_address_limit(host: dict[str, int], tried: int | None) -> bool:
    """Whether it was the limit of addresses that the process came up against: some have one that is never reached."""
    limit, taken = host.get("address_limit_bytes"), host.get("virtual_bytes", 0)
    if limit is None:
        return False
    if tried is None:  # Python's own error does not say how much: the limit comes first where the host has more to give
        return limit - taken < max(host.get("available_bytes", 0), limit - _NEARLY * limit)
    return taken + tried > _NEARLY * limit


def _taken(host: dict[str, int], tried: int | None, who: str) -> str:
    """What this process has of the host's memory, and which limit it came up against."""
    if _is_address_limit(host, tried) and "virtual_bytes" in host:
        limit = size(host["address_limit_bytes"])
        return f"; {who} has {size(host['virtual_bytes'])} of the {limit} of addresses that it may have (ulimit -v)"
    if "rss_bytes" not in host:
        return ""
    room = [size(host[name]) for name in ("limit_bytes", "total_bytes") if name in host][:1]
    return f"; {who} has {size(host['rss_bytes'])}" + (f" of {room[0]}" if room else "")


def _fix(plans: list[dict[str, Any]]) -> str:
    said = [
        plan["do"] + (f" Saves about {size(plan['saves_bytes'])}." if "saves_bytes" in plan else "") for plan in plans
    ]
    return " ".join(f"{number}. {text}" for number, text in enumerate(said[:4], 1))
