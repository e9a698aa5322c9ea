"""Whether what a page shows has changed: what is as it was stays, so that an open menu, a selection and the focus stay."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from plotly.io.json import to_json_plotly  # type: ignore[import-untyped]

__all__ = ["digest"]


def digest(content: Any) -> str:
    """Of components, texts and lists of both."""
    return sha256(to_json_plotly(content).encode()).hexdigest()
