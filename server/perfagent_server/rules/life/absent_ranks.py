"""Finds the ranks that did not join a collective in which others wait, by the last sequence number of each process group.

Pure. A rank that has called fewer collectives of a group than one that waits there keeps that one waiting. It may itself
wait in another group, as a tensor-parallel rank whose data-parallel peers have gone on: the culprit is who is waited for
and waits for nobody. Where nobody is, the ranks wait for each other: they call collectives in different orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Absence", "find_absence"]


_OF_ONE_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "allgather_base"})
"""Collectives whose input has the same size on every rank."""


class _Call(NamedTuple):
    """What one rank has called in one group. recent: number -> name of the last ones; sizes, is_new: of the newest one's input,
    and whether the rank never called it there before."""

    seq: int
    waits: bool
    recent: dict[int, str]
    sizes: str = ""
    is_new: bool = False


class _Key(NamedTuple):
    """A group, as all its ranks name it."""

    group: str
    backend: str
    members: str


@dataclass(frozen=True, slots=True)
class Absence:
    """Some ranks that others wait for.

    kind: "absent": they have not called it; "order": they wait in another group, for those that wait for them;
    "mismatch": they called another collective under the same number, or with an input of another size. group: its name,
    with its description; number, operation: of the collective; last: the newest number and operation of those ranks there;
    waiting: who waits in it.
    """

    kind: str
    ranks: list[int]
    group: str
    operation: str
    number: int
    last: tuple[int, str]
    waiting: list[int]

    def shown(self) -> dict[str, Any]:
        """As evidence."""
        number, operation = self.last
        return {
            "kind": self.kind, "ranks": self.ranks, "group": self.group, "operation": self.operation,
            "number": self.number, "last_number": number or None, "last_operation": operation, "waiting": self.waiting,
        }  # fmt: skip


def find_absence(answers: Sequence[tuple[int, Sequence[dict[str, Any]], bool]]) -> Absence | None:
    """answers: (rank, its groups as the agent tells them, whether these are all it ever called). None where all have
    called the same, or it cannot be told."""
    calls, titles = _by_group(answers)
    awaited: dict[int, list[tuple[_Key, list[int]]]] = {}  # rank -> where, and by whom
    waits: set[int] = set()
    for key, by_rank in calls.items():
        furthest = max((call.seq for call in by_rank.values() if call.waits), default=0)
        for rank, call in by_rank.items():
            if call.seq >= furthest:
                continue
            waiting = [other for other, its in by_rank.items() if its.waits and its.seq > call.seq]
            awaited.setdefault(rank, []).append((key, sorted(waiting)))
            waits.update(waiting)
    culprits = sorted(rank for rank in awaited if rank not in waits)
    if all(any(rank in by_rank and by_rank[rank].waits for by_rank in calls.values()) for rank in culprits) and (
        found := _mismatch(calls, titles)
    ):
        return found
    if culprits:
        return _absence("absent", culprits, awaited, calls, titles)
    if awaited:
        newly = {rank for by_rank in calls.values() for rank, call in by_rank.items() if call.waits and call.is_new}
        return _absence("order", sorted(newly & awaited.keys() or awaited), awaited, calls, titles)
    return None


def _by_group(
    answers: Iterable[tuple[int, Sequence[dict[str, Any]], bool]],
) -> tuple[dict[_Key, dict[int, _Call]], dict[_Key, str]]:
    calls: dict[_Key, dict[int, _Call]] = {}
    titles: dict[_Key, str] = {}
    members: dict[tuple[str, str], set[int]] = {}  # ranks that have a group, whatever they have called in it
    complete = set()
    for rank, groups, is_complete in answers:
        if is_complete:
            complete.add(rank)
        for one in groups:
            name, hashed = one["group"], str(one.get("members", ""))
            members.setdefault((name, hashed), set()).add(rank)
            if not one.get("backend"):
                continue
            key = _Key(name, str(one["backend"]), hashed)
            calls.setdefault(key, {})[rank] = _Call(
                one["seq"],
                one.get("waits") is True,
                dict(map(tuple, one["recent"])),
                str(one.get("sizes") or "")[:200],
                one.get("is_new") is True,
            )
            desc = str(one.get("desc") or "")
            titles[key] = f"{name} ({desc})" if desc and desc != name else name or "?"
    for key, by_rank in calls.items():
        for rank in (members[key.group, key.members] & complete) - by_rank.keys():
            by_rank[rank] = _Call(0, False, {})
    return calls, titles


def _absence(
    kind: str,
    culprits: list[int],
    awaited: dict[int, list[tuple[_Key, list[int]]]],
    calls: dict[_Key, dict[int, _Call]],
    titles: dict[_Key, str],
) -> Absence:
    """In the group where most wait for the first of them; others that are behind in the same place are named with it."""
    key, waiting = max(awaited[culprits[0]], key=lambda where: len(where[1]))
    by_rank = calls[key]
    first = by_rank[culprits[0]]
    together = [
        rank for rank in culprits if any(at == key for at, _ in awaited[rank]) and by_rank[rank].seq == first.seq
    ]
    number = first.seq + 1
    operation = next((by_rank[rank].recent[number] for rank in waiting if number in by_rank[rank].recent), "")
    if not operation:  # so far behind that it is not among the last ones
        number = by_rank[waiting[0]].seq
        operation = by_rank[waiting[0]].recent.get(number, "")
    last = (first.seq, first.recent.get(first.seq, ""))
    return Absence(
        kind, together, titles[key], operation, number, last, [rank for rank in waiting if rank not in together]
    )


def _mismatch(calls: dict[_Key, dict[int, _Call]], titles: dict[_Key, str]) -> Absence | None:
    """The first number of a group under which not all ranks have called the same; else ranks that wait in it with inputs
    of other sizes."""
    for key, by_rank in calls.items():
        waiting = {rank: call for rank, call in by_rank.items() if call.waits}
        numbers = sorted({number for call in by_rank.values() for number in call.recent}) if waiting else []
        for number in numbers:
            called = {rank: call.recent[number] for rank, call in by_rank.items() if number in call.recent}
            if len({*called.values()}) == 1 and {*called.values()} <= _OF_ONE_SIZE:
                of_size = {rank: call.sizes for rank, call in waiting.items() if call.seq == number and call.sizes}
                called = {rank: f"{called[rank]} of {size}" for rank, size in of_size.items()}
            if len({*called.values()}) > 1:
                return _named(number, called, by_rank, titles[key])
    return None


def _named(number: int, called: dict[int, str], by_rank: dict[int, _Call], title: str) -> Absence:
    """Those of whom there are fewest; of as many, those that call what they never called there before."""
    ranks: dict[str, list[int]] = {}
    for rank, operation in sorted(called.items()):
        ranks.setdefault(operation, []).append(rank)
    (fewest, few), *_, (most, many) = sorted(
        ranks.items(), key=lambda one: (len(one[1]), -sum(by_rank[rank].is_new for rank in one[1]), -min(one[1]))
    )
    return Absence("mismatch", few, title, most, number, (number, fewest), many)
