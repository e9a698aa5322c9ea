"""What tests of the rules engine share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()
