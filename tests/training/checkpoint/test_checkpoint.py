"""What is saved, when, and that training goes on from it as if nothing had happened."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from resumable import small_loop, train

from perfagent.errors import CheckpointError, ConfigError
from perfagent_loop import saving
from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.loop import loop as make_loop


@pytest.mark.parametrize(("asynchronous", "stop_after"), [(False, 1), (True, 6), (False, 7), (True, 11)])
def test_a_resumed_training_has_the_losses_of_a_whole_one(tmp_path: Path, asynchronous: bool, stop_after: int) -> None:
    reference = small_loop()
    torch.manual_seed(9)
    whole = train(reference)

    first = small_loop(tmp_path, every=1, asynchronous=asynchronous)
    torch.manual_seed(9)
    before = train(first, steps=stop_after)
    first.checkpoint.close()  # type: ignore[union-attr]

    second = small_loop(tmp_path, every=1)
    torch.manual_seed(777)
    assert second.resume() == stop_after
    assert [*before, *train(second)] == whole


def test_it_is_saved_every_so_many_steps(tmp_path: Path) -> None:
    training = small_loop(tmp_path / "runs", every=5, keep=10)
    assert training.resume() is None
    assert not (tmp_path / "runs").exists()
    train(training)
    assert sorted(path.name for path in (tmp_path / "runs").glob("step_*")) == ["step_10", "step_5"]


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
    found = Checkpoint(tmp_path).load_latest()
    assert found is not None
    loaded = found[1]
    assert torch.equal(loaded["model"]["weight"], torch.ones(4))
    assert torch.equal(loaded["rng"]["torch"], torch.ones(4))
    assert loaded["model"]["weight"].data_ptr() == loaded["model"]["tied"].data_ptr()


def test_a_failed_asynchronous_save_is_told_and_raised_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(tmp_path, asynchronous=True)

    def refused(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "fsync", refused)
    checkpoint.save(1, {"model": {}})
    checkpoint._thread.join()  # type: ignore[union-attr]
    assert "Permission denied" in caplog.text  # whether or not there is a next call
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.wait()
    checkpoint.close()


def test_errors_that_may_pass_are_tried_again_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, failures = os.fsync, [OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "I/O error")]
    monkeypatch.setattr("perfagent_loop.retry.time.sleep", lambda seconds: None)

    def sometimes(handle: int) -> None:
        if failures:
            raise failures.pop()
        real(handle)

    monkeypatch.setattr(os, "fsync", sometimes)
    checkpoint = Checkpoint(tmp_path, tries=3)
    with caplog.at_level(logging.WARNING, "perfagent"):
        checkpoint.save(1, {"model": {}})
    assert caplog.text.count("tried again") == 2
    assert checkpoint.latest() == tmp_path / "step_1"
    failures.append(OSError(errno.EROFS, "Read-only file system"))
    with pytest.raises(CheckpointError, match="Read-only"):
        checkpoint.save(2, {"model": {}})
    assert not failures


def test_training_survives_some_failed_saves_and_not_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = small_loop(tmp_path, every=1, tolerate=2)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, "perfagent"), pytest.raises(CheckpointError, match="No space left"):
        train(training)
    assert training.step_count == 3
    assert caplog.text.count("training goes on") == 2


def test_a_checkpoint_of_another_model_is_refused_by_its_name(tmp_path: Path) -> None:
    train(small_loop(tmp_path, every=1), steps=1)
    model = torch.nn.Linear(4, 2)
    other = make_loop(
        model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=Checkpoint(tmp_path, emergency=False)
    )
    with pytest.raises(CheckpointError, match=r"(?s)step_1 in .* is whole, but does not fit .*Missing key"):
        other.resume()


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        Checkpoint(tmp_path / "file")
    with pytest.raises(ConfigError, match="name another folder"):
        train(small_loop(tmp_path / "file" / "runs", every=1000), steps=1)


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
