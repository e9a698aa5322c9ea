"""The evidence of a finding, completed when it is sent.

A run that ends at its NaN, or without memory, reports that on the training thread, before the rows of its last seconds
are read. What those rows say is added when the finding is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["Evidence"]


class Evidence(Mapping[str, Any]):
    """found, and what `more` gives when it is first read: on the sender's thread, when it is sent. Where that
    fails, and is contained, what was found is sent all the same."""

    def __init__(self, found: dict[str, Any], more: Callable[[], dict[str, Any] | None]) -> None:
        self._found = found
        self._more: Callable[[], dict[str, Any] | None] | None = more

    def _whole(self) -> dict[str, Any]:
        more, self._more = self._more, None
        if more is not None:
            self._found |= more() or {}
        return self._found

    def __getitem__(self, name: str) -> Any:
        return self._whole()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())
