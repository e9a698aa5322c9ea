"""What tests of alerts share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_builders import api
from clocks import Clock
from fastapi.testclient import TestClient
from posting import Posts
from told import Told


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.database.close()


@pytest.fixture
def clock() -> Clock:
    """Of a server and its outbox."""
    return Clock(time.time())


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def client(tmp_path: Path, posts: Posts, clock: Clock) -> Iterator[TestClient]:
    with api(tmp_path, send=posts, clocks={"clock": clock}) as made:
        yield made
