"""What one test's training leaves behind in the process, and another's must not find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perfagent import session


@pytest.fixture(autouse=True)
def nothing_to_continue() -> Iterator[None]:
    """A loop that resumed tells so to whoever attaches next: the run of the next test would begin at its step."""
    yield
    session._resumed = None
