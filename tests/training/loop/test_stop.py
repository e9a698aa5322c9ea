"""perfagent.loop is stopped from afar without a word in the script: batches() ends, after a save that is never the best."""

from __future__ import annotations

from pathlib import Path

import pytest
from resumable import batches, small_loop

import perfagent
from perfagent.step.state import state
from perfagent_loop.folder import Folder


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_loop_ends_after_a_save_that_is_not_the_best(tmp_path: Path, spoilt: bool) -> None:
    """Weights with a NaN are not saved. A script that goes on is left after its next step."""
    run = perfagent.attach(record=tmp_path / "record")
    training = small_loop(tmp_path / "runs", every=None, best="min")
    training.checkpoint.rate(0.1)  # type: ignore[union-attr]
    for inputs, targets in training.batches(batches(), epochs=99):
        with training.forward():
            loss = (training.model(inputs) - targets).square().mean()
        training.backward(loss * float("nan") if spoilt and training.step_count == 3 else loss)
        training.step()
        if training.step_count == 3:
            assert state.current is not None
            state.current.links.investigator.obey({"id": "c1", "kind": "stop", "params": {"why": "asked by Ann"}})
    assert training.step_count == 4
    saved = [(one.step, one.reason, one.metric) for _, one in Folder(tmp_path / "runs").candidates()]
    assert saved == ([] if spoilt else [(4, "stopped", None)])
    inputs, targets = next(iter(batches()))
    with pytest.raises(perfagent.Stopped, match="asked by Ann"):
        training.backward((training.model(inputs) - targets).square().mean())
        training.step()
    training.checkpoint.close()  # type: ignore[union-attr]
    run.finish()
