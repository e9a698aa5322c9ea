"""Attributes with hyphens, which are no Python names: `data_page="run"` is `data-page`."""

from __future__ import annotations

from typing import Any

__all__ = ["hyphenated"]


def hyphenated(**names: str) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in names.items()}
