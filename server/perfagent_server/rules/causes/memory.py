"""Says what filled the memory when an allocation failed, and what would make room."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire.evidence import MemoryEvidence
from perfagent_server.rules.texts import Language, Phrases

__all__ = ["Plan", "message_and_fix", "plans"]

_NEARLY = 0.9
"""Of the limit of addresses: torch's message may say less than its allocator asked for."""
_UNUSED = 0.1
"""Of what is in use: so much that is reserved and not allocated lies in pieces."""
_MOST_PLANS = 4
_MOST_CATEGORIES = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be done. name: of its sentence; saves_bytes: an estimate, 0 where nothing is known; is_enough: for the
    allocation that failed."""

    name: str
    saves_bytes: int = 0
    is_enough: bool = False


def message_and_fix(found: MemoryEvidence, language: Language) -> tuple[str, str]:
    phrases = Phrases("memory", language)
    device, where, host = found["device"], found["where"], found.get("host", {})
    memory = "host" if device == "cpu" else "gpu"
    taken = ""
    if device == "cpu":
        who = "trainer" if "worker" in found else "process"
        if _is_address_limit(found) and "virtual_bytes" in host:
            taken = phrases.say("addresses", {**found, "who": who})
        elif "rss_bytes" in host:
            room = host.get("limit_bytes", host.get("total_bytes"))
            taken = phrases.say("resident", {**found, "who": who, "room_bytes": room})
    held = [
        phrases.say("category", {"category": name, "bytes": size})
        for name, size in [*found["categories"].items()][:_MOST_CATEGORIES]
    ]
    figures = {
        **found, "memory": memory, "taken": taken,
        "where": phrases.say("worker", found) if "worker" in found else None if where == "between steps" else where,
        "held": phrases.say("of_it" if taken else "holds", {"memory": memory, "held": held}) if held else "",
    }  # fmt: skip
    return phrases.say("failed", figures), _fix(found, phrases)


def _fix(found: MemoryEvidence, phrases: Phrases) -> str:
    figures = {**found, "room_bytes": found.get("capacity_bytes") or found.get("host", {}).get("total_bytes")}
    said = []
    for number, plan in enumerate(plans(found)[:_MOST_PLANS], 1):
        filled = {"number": number, "do": phrases.say(plan.name, figures), "saves_bytes": plan.saves_bytes}
        said.append(phrases.say("saves" if plan.saves_bytes else "plan", filled))
    return phrases.joined(said)


def plans(found: MemoryEvidence) -> list[Plan]:
    """What is enough for the allocation that failed first, and of equals the least change.

    Savings are estimates from the categories: halving the batch halves the activations; bf16 halves those of a float32
    model; checkpointing keeps about a third; AdamW in 8 bits a quarter of its state; FSDP or ZeRO an n-th of
    parameters, gradients and state.
    """
    held, allocator = found["categories"], found.get("allocator", {})
    tried, kind = found.get("tried_bytes"), found["device"].partition(":")[0]
    room = found.get("capacity_bytes") or found.get("host", {}).get("total_bytes")
    is_too_large = tried is not None and room is not None and tried > room
    unused = allocator.get("reserved_bytes.all.current", 0) - allocator.get("allocated_bytes.all.current", 0)
    activations, state = held.get("activations_and_other", 0), held.get("optimizer_state", 0)
    shared, ranks = held.get("parameters", 0) + held.get("gradients", 0) + state, found.get("world_size", 1)
    dtypes = found.get("dtypes")
    first = [
        (is_too_large, Plan("too_large")),
        (_is_address_limit(found), Plan("address_limit")),
        (kind == "cuda" and unused > _UNUSED * (sum(held.values()) or 1), Plan("fragmented", unused)),
    ]
    if "worker" in found:  # nothing of the model helps
        return [
            *(plan for applies, plan in first if applies),
            Plan("smaller_samples"),
            Plan("fewer_workers"),
            Plan("smaller_batch"),
        ]
    of_training = [
        (kind in ("cpu", "mps") and not is_too_large, Plan("kept")),
        (True, Plan("smaller_batch", activations // 2)),
        (not dtypes or "float32" in dtypes, Plan("mixed_precision", activations // 2)),
        (True, Plan("checkpointing", 2 * activations // 3)),
        (ranks > 1, Plan("sharding", shared * (ranks - 1) // max(ranks, 1))),
        (state > 0, Plan("smaller_state", 3 * state // 4)),
    ]
    applicable = [
        Plan(plan.name, plan.saves_bytes, tried is not None and plan.saves_bytes >= tried)
        for applies, plan in [*first, *of_training]
        if applies
    ]
    return sorted(applicable, key=lambda plan: not plan.is_enough)


def _is_address_limit(found: MemoryEvidence) -> bool:
    """Whether it was the limit of addresses that the process came up against: some have one that is never reached."""
    host, tried = found.get("host", {}), found.get("tried_bytes")
    limit, taken = host.get("address_limit_bytes"), host.get("virtual_bytes", 0)
    if limit is None:
        return False
    if tried is None:  # Python's own error does not say how much: the limit comes first where the host has more to give
        return limit - taken < max(host.get("available_bytes", 0), limit - _NEARLY * limit)
    return taken + tried > _NEARLY * limit
