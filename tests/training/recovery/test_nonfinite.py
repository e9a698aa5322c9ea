"""Windows with NaN: thrown away, answered by a lower learning rate, or by the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resumable import batches, small_loop, train
from torch.nn.utils import parameters_to_vector

from perfagent_loop.folder import Folder
from perfagent_loop.loop import Loop
from perfagent_loop.nonfinite import NanPolicy, NonFiniteGradients

NAN = float("nan")


def one_step(training: Loop, policy: NanPolicy, *, bad: bool) -> bool:
    """One window over the same rows; whether it was stepped."""
    inputs, targets = next(iter(batches()))
    with training.forward():
        loss = (training.model(inputs) - targets).square().mean()
    training.backward(loss * NAN if bad else loss)
    return policy.step(training).stepped


def weights(training: Loop) -> torch.Tensor:
    return parameters_to_vector(training.model.parameters()).detach()


def moments(training: Loop) -> list[torch.Tensor]:
    return [value["exp_avg"].clone() for value in training.optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("windows", [(True,), (True, False), (False, True)])
def test_a_bad_window_changes_nothing_and_the_next_is_stepped(windows: tuple[bool, ...]) -> None:
    """One bad micro-step throws all of its window away."""
    training, policy = small_loop(grad_accum=len(windows)), NanPolicy()
    for _ in windows:
        one_step(training, policy, bad=False)
    before, rate = weights(training), training.optimizer.param_groups[0]["lr"]
    assert not any(one_step(training, policy, bad=bad) for bad in windows)
    assert torch.equal(weights(training), before)
    assert (training.step_count, training.micro_steps, policy.total) == (1, 0, 1)
    assert training.optimizer.param_groups[0]["lr"] == rate
    assert [one_step(training, policy, bad=False) for _ in windows][-1]
    assert weights(training).isfinite().all()
    assert not torch.equal(weights(training), before)


def test_the_rate_is_lowered_for_good_and_too_many_end_it() -> None:
    training, policy = small_loop(), NanPolicy("lower_lr", factor=0.1, most=2)

    def rate() -> float:
        return float(training.optimizer.param_groups[0]["lr"])

    one_step(training, policy, bad=True)
    assert rate() == pytest.approx(0.005)
    for _ in range(3):  # to where the scheduler derives the next one
        one_step(training, policy, bad=False)
    assert rate() == pytest.approx(0.0025)
    for _ in range(2):
        one_step(training, policy, bad=True)
    with pytest.raises(NonFiniteGradients, match="not finite"):
        one_step(training, policy, bad=True)


def test_rolling_back_takes_weights_and_optimizer_and_goes_on(tmp_path: Path) -> None:
    training, policy = small_loop(tmp_path, every=2, keep=1), NanPolicy("rollback")
    for _ in range(2):
        one_step(training, policy, bad=False)
    saved = weights(training), moments(training)
    one_step(training, policy, bad=False)
    assert not torch.equal(weights(training), saved[0])
    assert not one_step(training, policy, bad=True)
    torch.testing.assert_close((weights(training), moments(training)), saved, rtol=0, atol=0)
    assert training.step_count == 3  # the count goes on, as do the data


def test_a_training_full_of_bad_windows_keeps_good_checkpoints(tmp_path: Path) -> None:
    training, policy = small_loop(tmp_path, every=4, keep=3), NanPolicy()
    for number in range(24):
        one_step(training, policy, bad=number % 2 == 1)
    assert [manifest.reason for _, manifest in Folder(tmp_path).candidates()] == ["every", "every", "every"]


def test_a_checkpoint_made_at_a_bad_window_goes_on_after_it(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.0, NAN, NAN, *[1.0] * 7]

    def trained(loop: Loop, factors: list[float], seed: int) -> list[float]:
        left = iter(factors)
        torch.manual_seed(seed)
        return train(loop, before=lambda: next(left), step=NanPolicy().step)

    whole = trained(small_loop(tmp_path, every=None), factors, seed=9)
    [(_, manifest)] = Folder(tmp_path).candidates()  # of the first of a row, for who looks into it
    assert (manifest.reason, manifest.number, manifest.step) == ("nan", 1, 3)
    resumed = small_loop(tmp_path, every=None)
    assert resumed.resume() == 3
    assert trained(resumed, factors[4:], seed=77) == whole[4:]
