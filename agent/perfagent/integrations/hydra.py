"""Hydra: `--multirun` does one job after another in one process, each of which is a run of its own."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["is_next_job"]

_job: int | None = None
"""The newest that attached."""


def is_next_job() -> bool:
    """Whether another job has begun since this was last asked."""
    global _job
    before, hydra = _job, sys.modules.get("hydra.core.hydra_config")
    if hydra is not None:
        with contextlib.suppress(Exception):  # outside of a job, where there is one only, or in another version
            _job = int(hydra.HydraConfig.get().job.num)
    return None not in (before, _job) and before != _job
