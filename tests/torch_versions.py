"""What only newer versions of torch can do, for tests that scripts/versions runs with older ones."""

from __future__ import annotations

from importlib.metadata import version

import pytest

__all__ = ["TORCH", "since_torch"]

TORCH = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])


def since_torch(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """Skips a test with older versions. why: what they lack."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"not before torch {major}.{minor}: {why}")
