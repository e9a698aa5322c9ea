"""What one test lets redaction remember is no secret in the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perfagent.redaction.remembered import forget


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    forget()
    yield
    forget()
