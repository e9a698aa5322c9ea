"""What is saved, and when. That training goes on from it as if nothing had happened is in loop/test_loop.py."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from resumable import small_loop, train

from perfagent.errors import CheckpointError
from perfagent_loop import saving
from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.loop import loop as make_loop
from perfagent_loop.retry import retry


def test_an_asynchronous_save_holds_the_state_of_its_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, real = threading.Event(), saving.write

    def held_up(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr("perfagent_loop.checkpoint.write", held_up)
    weight = torch.ones(4)
    checkpoint = Checkpoint(tmp_path, asynchronous=True)
    checkpoint.save(1, {"model": {"weight": weight, "tied": weight}, "rng": {"torch": weight}})
    weight.zero_()
    may_write.set()
    checkpoint.close()
    _, loaded = Checkpoint(tmp_path).load_latest() or pytest.fail("nothing was saved")
    for tensor in (loaded["model"]["weight"], loaded["rng"]["torch"]):
        assert torch.equal(tensor, torch.ones(4))
    assert loaded["model"]["weight"].data_ptr() == loaded["model"]["tied"].data_ptr()


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """What the disk answers next, the last one first."""
    real, left = os.fsync, list[OSError]()

    def fsync(handle: int) -> None:
        if left:
            raise left.pop()
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setitem(retry.__kwdefaults__, "pause", lambda seconds: None)
    return left


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_asynchronous_save_is_told_and_raised_later(
    tmp_path: Path, errors: list[OSError], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(tmp_path, asynchronous=True)
    errors.append(full())
    checkpoint.save(1, {"model": {}})
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.wait()
    assert "No space left" in caplog.text  # whether or not there is a next call
    checkpoint.close()


def test_errors_that_may_pass_are_tried_again_and_others_are_not(
    tmp_path: Path, errors: list[OSError], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(tmp_path, tries=3)
    errors += [OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "I/O error")]
    checkpoint.save(1, {"model": {}})
    assert caplog.text.count("tried again") == 2
    errors += [OSError(errno.EIO, "never reached"), full()]
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(2, {"model": {}})
    assert len(errors) == 1
    assert {path.name for path in tmp_path.iterdir()} == {".in_use", "latest", "step_1"}  # as it was
    assert checkpoint.latest() == tmp_path / "step_1"


def test_training_survives_some_failed_saves_and_not_more(
    tmp_path: Path, errors: list[OSError], caplog: pytest.LogCaptureFixture
) -> None:
    training = small_loop(tmp_path, every=1, tolerate=2)
    errors += [full() for _ in range(3)]
    with pytest.raises(CheckpointError, match="No space left"):
        train(training)
    assert training.step_count == 3
    assert caplog.text.count("training goes on") == 2


def test_a_checkpoint_of_another_model_is_refused_by_its_name(tmp_path: Path) -> None:
    train(small_loop(tmp_path, every=1), steps=1)
    model = torch.nn.Linear(4, 2)
    checkpoint = Checkpoint(tmp_path, emergency=False)
    other = make_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=checkpoint)
    with pytest.raises(CheckpointError, match=r"(?s)step_1 in .* is whole, but does not fit .*Missing key"):
        other.resume()


def test_an_interrupt_within_the_context_saves_the_last_step(tmp_path: Path) -> None:
    training = small_loop(tmp_path, emergency=True)
    with pytest.raises(KeyboardInterrupt), training.checkpoint:  # type: ignore[union-attr]
        train(training, steps=2)
        raise KeyboardInterrupt
    assert small_loop(tmp_path).resume() == 2


def test_weights_with_nan_are_never_saved(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, {"model": {"mask": torch.tensor([float("-inf"), float("inf")])}})
    with pytest.raises(CheckpointError, match="weight of the model holds NaN"):
        checkpoint.save(2, {"model": {"weight": torch.tensor([1.0, float("nan")])}})
    assert checkpoint.latest() == tmp_path / "step_1"
