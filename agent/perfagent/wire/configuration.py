"""How the configuration of a run is read: what the user set, what the agent found, code, environment and packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["GROUPS", "divided", "flattened"]

GROUPS = ("yours", "found", "code", "environment", "packages")

_FOUND = frozenset(
    {"argparse", "click", "absl", "huggingface", "hydra", "lightning", "deepspeed", "model", "optimizer", "techniques"}
)
"""Keys of the configuration that the agent writes (docs/wire.md, Context events)."""
_CODE = ("git", "command", "script")


def divided(config: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Each of GROUPS with its entries, as they were sent."""
    packages = meta.get("packages")
    return {
        "yours": {name: value for name, value in config.items() if name not in _FOUND},
        "found": {name: value for name, value in config.items() if name in _FOUND},
        "code": {name: meta[name] for name in _CODE if name in meta},
        "environment": {name: value for name, value in meta.items() if name not in (*_CODE, "packages")},
        "packages": packages if isinstance(packages, Mapping) else {},
    }


def flattened(table: Mapping[str, Any], front: str = "", *, with_empty: bool = False) -> Iterator[tuple[str, Any]]:
    """Entries of nested tables, with dots in their names: `optimizer.lr`. with_empty: also those that hold nothing."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{front}{name}.", with_empty=with_empty)
        elif with_empty or value not in (None, "", [], {}):
            yield f"{front}{name}", value
