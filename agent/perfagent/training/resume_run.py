"""Continues the run of a resumed training: its chart goes on where the checkpoint was, under the id that the checkpoint
holds.
"""

from __future__ import annotations

import os

from perfagent.session import attach, current, resumed_at

__all__ = ["continue_run"]


def continue_run(run_id: str | None, step: int) -> None:
    """Says that the step to come is step + 1 of the run with that id.

    A run that was attached before and has made no step yet is replaced by it, unless its id was given by the user; one
    that is attached later takes it up.
    """
    run = current()
    if run is None:
        resumed_at(run_id, step + 1)
        return
    if run._progress.last is not None:
        return  # rolled back, or resumed within a process: its steps go on
    given = os.environ.get("PERFAGENT_RUN_ID") or run.settings.run_id
    if run_id is None or run.id == run_id or (given and given == run.id):
        run.start_at(step + 1)
        return
    resumed_at(run_id, step + 1)
    attach(
        run._known_model(),
        run._known_optimizer(),
        project=run.settings.project,
        name=run.name,
        config=run.config,
        tags=run.tags,
        group=run.group,
        server=run.settings.server if run.settings.is_server_given else None,
        record=run.settings.record,
        run_id=run_id,
        start_step=step + 1,
    )
