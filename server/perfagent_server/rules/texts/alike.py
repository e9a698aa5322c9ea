"""What the titles of findings that are alike have in common, in any language. Pure."""

from __future__ import annotations

import re

__all__ = ["alike"]

_VARIES = re.compile(r"`[^`]*`|\d(?:[\d.,:]*\d)?(?:e[+−-]?\d+)?")


def alike(title: str) -> str:
    """A title with "…" for its numbers and quoted names, which differ from one run to the next."""
    return _VARIES.sub("…", title)
