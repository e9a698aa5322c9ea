"""docs/reference/rules.md: the server's rules, and the pages of docs/symptoms that name them."""

from __future__ import annotations

import re
from pathlib import Path

from perfagent_server.rules.handbook import handbook

__all__ = ["rules"]

_SYMPTOMS = Path(__file__).resolve().parents[2] / "docs" / "symptoms"
_RULE = re.compile(r"rules\.md#([a-z0-9_]+)-")


def rules() -> str:
    """The page."""
    return handbook(_pages())


def _pages() -> dict[str, str]:
    """Rule -> links to the pages that link to it."""
    links: dict[str, list[str]] = {}
    for path in sorted(_SYMPTOMS.glob("*.md")):
        text = path.read_text("utf-8")
        title = text.partition("\n")[0].removeprefix("# ").partition(":")[0]
        for rule in sorted(set(_RULE.findall(text))) if path.stem != "index" else ():
            links.setdefault(rule, []).append(f"[{title}](../symptoms/{path.name})")
    return {rule: ", ".join(found) for rule, found in links.items()}
