"""What tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_builders import api
from fastapi.testclient import TestClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """Of a server in this process."""
    with api(tmp_path) as made:
        yield made
