"""Reports which collective this rank called last in each of its process groups: read from torch's flight recorder, which
records them on gloo and NCCL without a setting.

The rank whose number in a group is lower than that of the others did not join what they wait for. Recorder and list of
groups are private to torch: where either is missing or has changed, nothing is reported. A full recorder's dump holds the
interpreter for up to 0.1 s, so it is taken only while the training stands.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from perfagent.boundary.guard import guarded

__all__ = ["last_collectives"]

MOST_GROUPS = 64
RECENT = 8
"""Collectives of each group that are named; a rank may be some behind, as in a backward pass with several buckets."""
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""NCCL writes into a recorder of its own, which only torch for GPUs has."""


@guarded
def last_collectives() -> dict[str, object]:
    """ "groups": an entry a process group and backend; {} where nothing is known. seq: how many collectives this rank has
    called there; waits: the last one has not completed; recent: the last ones by number and name, oldest first; sizes: of
    the newest one's input; is_new: this rank has never called it after the one before it; size, members: how many ranks the
    group has, and a hash of them, since names are used again. complete: nothing was overwritten, so that in a group without
    a backend none was called."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return {}
    called, complete = _called(torch)
    groups = _groups()
    known = {name for name, _ in called}
    unused = [(name, "") for name in groups if name not in known]
    listed = [
        _entry(name, backend, called.get((name, backend), [])) | groups.get(name, {})
        for name, backend in [*called, *unused][:MOST_GROUPS]
    ]
    return {"groups": listed, "complete": complete} if listed else {}


def _called(torch: Any) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], bool]:
    """The recorded collectives by group and backend, oldest first; and whether they are all that were ever called."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    complete = False
    for place, dump in enumerate(_dumps(torch)):
        raw = dump()
        entries = json.loads(raw if isinstance(raw, (str, bytes)) else bytes(raw)).get("entries") or []
        complete = (complete or not place) and (not entries or entries[0].get("record_id") == 0)
        for entry in entries:
            if not entry.get("is_p2p"):
                backend = str(entry.get("profiling_name", "")).partition(":")[0][:64]
                found.setdefault((str(entry["process_group"][0])[:256], backend), []).append(entry)
    return found, complete


def _dumps(torch: Any) -> Iterator[Callable[[], Any]]:
    for name in _DUMPS:
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
        if dump is not None:
            yield dump


def _entry(name: str, backend: str, entries: list[dict[str, Any]]) -> dict[str, object]:
    # of several that are coalesced each is recorded, under one number
    numbers = {int(entry["collective_seq_id"]): _operation(entry) for entry in entries}
    last = entries[-1] if entries else {}
    pairs = [(_shape(one), _shape(other)) for one, other in itertools.pairwise(entries)]
    desc = str((last.get("process_group") or ["", ""])[1])[:64]
    return {
        "group": name, "backend": backend, "desc": "" if desc == "undefined" else desc, "seq": max(numbers, default=0),
        "waits": bool(last) and not last.get("retired") and last.get("state") != "completed",
        "recent": [[number, numbers[number]] for number in sorted(numbers)[-RECENT:]],
        "sizes": str(last.get("input_sizes", ""))[:200], "is_new": bool(pairs) and pairs[-1] not in pairs[:-1],
    }  # fmt: skip


def _operation(entry: dict[str, Any]) -> str:
    """`all_reduce` of "gloo:all_reduce"."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2][:64]


def _shape(entry: dict[str, Any]) -> tuple[str, str]:
    return _operation(entry), str(entry.get("input_sizes"))


def _groups() -> dict[str, dict[str, object]]:
    """Size and members of each process group, by its name; empty where torch keeps no such list."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    names, ranks = getattr(world, "pg_names", None), getattr(world, "pg_group_ranks", None)
    if not isinstance(names, dict) or not isinstance(ranks, dict):
        return {}
    found: dict[str, dict[str, object]] = {}
    for group, name in [*names.items()]:
        members = sorted(ranks.get(group) or ())
        digest = hashlib.blake2b(repr(members).encode(), digest_size=4).hexdigest()
        found[str(name)[:256]] = {"size": len(members), "members": digest}
    return found
