"""Which settings, packages and places differ between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfagent.wire.configuration import GROUPS, divided, flattened

__all__ = ["Difference", "Differences", "differences_of"]

_NOISE = frozenset({"pid", "started", "boot_id", "port", "run_id", "log_file"})
"""Last parts of names that differ between any two runs and explain nothing."""


@dataclass(slots=True)
class Difference:
    """group: yours (what the user set), found (by the agent), code, environment or packages. values: one a run, null where
    it has none."""

    group: str
    name: str
    values: list[Any]


@dataclass(slots=True)
class Differences:
    """equal: how many entries are the same in all runs, by group."""

    different: list[Difference]
    equal: dict[str, int]


def differences_of(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Differences:
    """runs: configuration and meta of each. What the user set comes first."""
    tables = [divided(config, meta) for config, meta in runs]
    different: list[Difference] = []
    equal = dict.fromkeys(GROUPS, 0)
    for group in GROUPS:
        flat = [dict(flattened(table[group])) for table in tables]
        for name in sorted({name for one in flat for name in one}):
            values = [one.get(name) for one in flat]
            if all(_same(value, values[0]) for value in values):
                equal[group] += 1
            elif group == "yours" or name.rsplit(".", 1)[-1] not in _NOISE:
                different.append(Difference(group, name, values))
    return Differences(different, equal)


def _same(one: Any, other: Any) -> bool:
    """1 and 1.0 are the same, 1 and true are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
