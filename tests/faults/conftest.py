from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.accounts import Accounts


@pytest.fixture
def fault(tmp_path: Path) -> Iterator[Accounts]:
    """The senders and servers of a row; their books are checked when the test is over."""
    accounts = Accounts(tmp_path)
    try:
        yield accounts
    finally:
        accounts.close()
