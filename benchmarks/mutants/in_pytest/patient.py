"""A plugin of pytest: no test has less than ten minutes, and none need stay in its process. The machine may be busy, coverage
costs time, and both are rules of the suite about itself. What a mutant makes hang is ended from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

_TIMEOUT_S = 600


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after all others, which add marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    yield
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "unit"]
        marked = item.get_closest_marker("timeout")
        if marked is None or not marked.args or marked.args[0] < _TIMEOUT_S:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S), append=False)
