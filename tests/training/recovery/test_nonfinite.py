"""Windows with NaN: thrown away, answered by a lower learning rate, or by the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resumable import batches, small_loop

from perfagent.errors import ConfigError
from perfagent_loop.folder import Folder
from perfagent_loop.loop import Loop
from perfagent_loop.nonfinite import NanPolicy, NonFiniteGradients


def weights(training: Loop) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in training.model.parameters()])


def one_step(training: Loop, policy: NanPolicy, *, bad: bool) -> bool:
    """One window over the same rows; whether it was stepped."""
    inputs, targets = next(iter(batches()))
    with training.forward():
        loss = (training.model(inputs) - targets).square().mean()
    training.backward(loss * float("nan") if bad else loss)
    return policy.step(training).stepped


def test_a_bad_window_changes_nothing_and_the_next_is_stepped() -> None:
    training, policy = small_loop(), NanPolicy()
    assert one_step(training, policy, bad=False)
    before, rate = weights(training), training.optimizer.param_groups[0]["lr"]
    assert not one_step(training, policy, bad=True)
    assert torch.equal(weights(training), before)
    assert (training.step_count, policy.total, training.optimizer.param_groups[0]["lr"]) == (1, 1, rate)
    assert one_step(training, policy, bad=False)
    assert weights(training).isfinite().all()
    assert not torch.equal(weights(training), before)


def test_one_bad_micro_step_throws_the_whole_window_away() -> None:
    training, policy = small_loop(grad_accum=2), NanPolicy()
    before = weights(training)
    assert not one_step(training, policy, bad=True)  # waits for its second micro-step
    assert training.micro_steps == 1
    assert not one_step(training, policy, bad=False)
    assert training.micro_steps == 0
    assert policy.total == 1
    assert torch.equal(weights(training), before)


def test_too_many_bad_windows_in_a_row_end_the_training() -> None:
    training, policy = small_loop(), NanPolicy(most=2)
    for bad in (True, True, False, True, True):
        one_step(training, policy, bad=bad)
    with pytest.raises(NonFiniteGradients, match="not finite"):
        one_step(training, policy, bad=True)


def test_the_learning_rate_is_lowered_for_good() -> None:
    training, policy = small_loop(), NanPolicy("lower_lr", factor=0.1)
    one_step(training, policy, bad=True)
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    for _ in range(3):  # to where the scheduler derives the next one
        one_step(training, policy, bad=False)
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.0025)


def test_rolling_back_takes_weights_and_optimizer_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs something to go back to"):
        one_step(small_loop(), NanPolicy("rollback"), bad=False)
    training = small_loop(tmp_path, every=2, keep=1)
    policy = NanPolicy("rollback")
    for _ in range(2):
        one_step(training, policy, bad=False)
    before = weights(training)
    of_optimizer = {key: value["exp_avg"].clone() for key, value in training.optimizer.state_dict()["state"].items()}
    one_step(training, policy, bad=False)
    assert not torch.equal(weights(training), before)
    assert not one_step(training, policy, bad=True)
    assert torch.equal(weights(training), before)
    assert training.step_count == 3  # the count goes on, as do the data
    for key, value in training.optimizer.state_dict()["state"].items():
        assert torch.equal(value["exp_avg"], of_optimizer[key])


def test_a_training_full_of_bad_windows_keeps_good_checkpoints(tmp_path: Path) -> None:
    training, policy = small_loop(tmp_path, every=4, keep=3), NanPolicy()
    for number in range(24):
        one_step(training, policy, bad=number % 2 == 1)
    assert [manifest.reason for _, manifest in Folder(tmp_path).candidates()] == ["every", "every", "every"]
    training, policy = small_loop(tmp_path / "none", every=None), NanPolicy()
    for _ in range(3):
        one_step(training, policy, bad=True)
    [(_, manifest)] = Folder(tmp_path / "none").candidates()  # of the first of a row, for who looks into it
    assert (manifest.reason, manifest.number) == ("nan", 1)


def test_a_checkpoint_made_at_a_bad_window_goes_on_after_it(tmp_path: Path) -> None:
    def training_of(loop: Loop, bad: float | None) -> list[float]:
        losses, policy = [], NanPolicy()
        for inputs, targets in loop.batches(batches(), epochs=2):
            with loop.forward():
                loss = (loop.model(inputs) - targets).square().mean()
            loop.backward(loss * float("nan") if loss.item() == bad else loss)
            policy.step(loop)
            losses.append(loss.item())
        return losses

    torch.manual_seed(9)
    bad = training_of(small_loop(), None)[3]
    torch.manual_seed(9)
    whole = training_of(small_loop(tmp_path, every=None), bad)
    torch.manual_seed(77)
    resumed = small_loop(tmp_path, every=None)
    assert resumed.resume() == 3
    assert training_of(resumed, bad) == whole[4:]
