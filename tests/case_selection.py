"""Which cases of a parametrized test run every day; `scripts/test --all` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["everyday"]


def everyday(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases with all but the first `count` marked `long`: those repeat the behavior on another mode or size."""
    return [case if place < count else _long(case) for place, case in enumerate(cases)]


def _long(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.long])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
