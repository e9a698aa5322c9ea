"""Continues the run of a resumed training: its chart goes on where the checkpoint was, under the id that the checkpoint
holds.
"""

from __future__ import annotations

from perfagent.session import current, resumed_at

__all__ = ["continue_run"]


def continue_run(run_id: str | None, step: int) -> None:
    """Says that the step to come is step + 1 of the run with that id. A run that is attached later takes it up."""
    run = current()
    if run is None:
        resumed_at(run_id, step + 1)
    else:
        run.continue_as(run_id, step + 1)
