"""Attributes with hyphens, which are no Python names: `data_page="run"` is `data-page`."""

from __future__ import annotations

from typing import Any

__all__ = ["OPENS", "hyphenated"]

OPENS = {"component": "button", "type": "button", "className": "button"}
"""Of the box around what opens a menu or a popover: it has the attributes that say so, so it is the button itself."""


def hyphenated(**names: str) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in names.items()}
