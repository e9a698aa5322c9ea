"""How to install what a part of perfagent needs, in the same words everywhere."""

from __future__ import annotations

__all__ = ["how_to_install"]


def how_to_install(*extras: str) -> str:
    """The command for these extras (`[project.optional-dependencies]` of pyproject.toml). perfagent is on no package
    index yet: whoever has its name there could put a package of theirs onto a server that holds keys."""
    return f"in the checkout: pip install '.[{','.join(extras)}]'"
