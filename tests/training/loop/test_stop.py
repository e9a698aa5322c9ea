"""perfagent.loop is stopped from afar without a word in the script: batches() ends, after a save that is never the best."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from resumable import batches, small_loop

import perfagent
from perfagent.step.state import state
from perfagent_loop.folder import Folder
from perfagent_loop.loop import Loop


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = perfagent.attach(record=tmp_path / "record")
    loop = small_loop(tmp_path / "runs", every=None, best="min")
    yield loop
    loop.checkpoint.close()  # type: ignore[union-attr]
    run.finish()


def steps(loop: Loop, *, spoilt: bool = False) -> None:
    for inputs, targets in loop.batches(batches(), epochs=99):
        with loop.forward():
            loss = (loop.model(inputs) - targets).square().mean()
        loop.backward(loss * float("nan") if spoilt and loop.step_count == 3 else loss)
        loop.step()
        if loop.step_count == 3:
            assert state.current is not None
            state.current.links.investigator.obey({"id": "c1", "kind": "stop", "params": {"why": "asked by Ann"}})


def test_a_loop_ends_after_a_save_that_is_not_the_best(training: Loop, tmp_path: Path) -> None:
    training.checkpoint.rate(0.1)  # type: ignore[union-attr]
    steps(training)
    [(_, saved)] = Folder(tmp_path / "runs").candidates()
    assert (training.step_count, saved.step, saved.reason, saved.metric) == (4, 4, "stopped", None)


def test_weights_with_a_nan_are_not_saved(training: Loop, tmp_path: Path) -> None:
    training.checkpoint.save_loop(training)  # type: ignore[union-attr]
    steps(training, spoilt=True)
    assert training.step_count == 4
    assert [saved.step for _, saved in Folder(tmp_path / "runs").candidates()] == [0]


def test_a_loop_that_goes_on_is_left_after_the_next_step(training: Loop) -> None:
    steps(training)
    inputs, targets = next(iter(batches()))
    with pytest.raises(perfagent.Stopped, match="asked by Ann"):
        training.backward((training.model(inputs) - targets).square().mean())
        training.step()
