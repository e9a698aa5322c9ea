"""How the configuration of a run is read: what the user set, what the agent found, code, environment and packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["GROUPS", "by_use", "divided", "flattened"]

GROUPS = ("yours", "found", "code", "environment", "packages")

_FOUND = (
    "argparse", "click", "absl", "hydra", "optimizer", "model", "huggingface", "lightning", "deepspeed", "techniques",
)  # fmt: skip
"""Keys of the configuration that the agent writes (docs/reference/wire.md, Configuration). Most looked at first."""
_CODE = ("git", "command", "script")


def divided(config: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Each of GROUPS with its entries, as they were sent."""
    packages = meta.get("packages")
    return {
        "yours": {name: value for name, value in config.items() if name not in _FOUND},
        "found": {name: config[name] for name in _FOUND if name in config},
        "code": {name: meta[name] for name in _CODE if name in meta},
        "environment": {name: value for name, value in meta.items() if name not in (*_CODE, "packages")},
        "packages": packages if isinstance(packages, Mapping) else {},
    }


def by_use(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in the order in which it is read: what the user set, then what the agent found."""
    groups = divided(config, {})
    return {**groups["yours"], **groups["found"]}


def flattened(table: Mapping[str, Any], front: str = "", *, with_empty: bool = False) -> Iterator[tuple[str, Any]]:
    """Entries of nested tables, with dots in their names: `optimizer.lr`. with_empty: also those that hold nothing."""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{front}{name}.", with_empty=with_empty)
        elif with_empty or value not in (None, "", [], {}):
            yield f"{front}{name}", value
