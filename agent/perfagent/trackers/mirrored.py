"""Numbers that a trainer hands to our logger, recorded as the mirroring records those that go to other loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfagent.integrations.loggers.capture import Logs, captured

__all__ = ["log_mirrored"]


def _of_call(values: Mapping[str, Any], step: int | None) -> list[Logs]:
    return [Logs(values, step, joint="/")]


@captured(_of_call, wanted=True)
def log_mirrored(values: Mapping[str, Any], step: int | None) -> None:
    """Writes nothing itself: `captured` has put the values into the run."""
