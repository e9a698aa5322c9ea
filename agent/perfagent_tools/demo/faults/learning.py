"""Faults of what the model learns: its loss, its gradients, its learning rate, its data."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from perfagent_tools.demo.faults.fault import Fault, Job, middle

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["FAULTS"]

_SPIKE_STEPS = 15  # longer than the nine steps over which the loss rule takes its median
_NOISE_SHARE = 0.3  # of the targets
_RATE_GROWTH, _MOST_RATE = 1.04, 600.0
_NOISE_GROWTH = 1.3  # a step
_OVERFLOW_GROWTH = 1.5  # a step: the scale must halve in more than every second one
_MOST = 1e12
_FEW_WINDOWS = 48  # so few that the model knows them by heart after some hundred steps
_REPEATED, _BATCH = 8, 16
_HELD_OUT = 32
_DEAD_BIAS = -10.0
_EVALUATED_EVERY = 20


class Nan(Fault):
    def begins(self, steps: int) -> int:
        return middle(steps)

    def loss(self, job: Job, step: int, token_losses: Tensor) -> Tensor:
        """The mean of the losses of all tokens that are not masked; nothing is masked in a healthy batch."""
        is_masked = step == job.middle
        kept = token_losses.new_zeros(token_losses.shape) if is_masked else token_losses.new_ones(token_losses.shape)
        return (token_losses * kept).sum() / kept.sum()


class Spike(Fault):
    def begins(self, steps: int) -> int:
        return steps - _SPIKE_STEPS + 1  # at the end: the rule first learns what is usual

    def batch(self, job: Job, step: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if step >= self.begins(job.steps):
            import torch

            is_noise = torch.rand(targets.shape, device=targets.device) < _NOISE_SHARE
            return tokens, torch.where(is_noise, torch.randint_like(targets, 256), targets)
        return tokens, targets


class Divergence(Fault):
    def begins(self, steps: int) -> int:
        return middle(steps) + 1

    def rate(self, step: int, steps: int) -> float:
        return min(_MOST_RATE, _RATE_GROWTH ** max(0, step - middle(steps)))


class GradExplosion(Fault):
    def begins(self, steps: int) -> int:
        return middle(steps) + 1

    def prepare(self, job: Job) -> None:
        _on_gradient(next(job.model.parameters()), lambda gradient: gradient * job.kept.get("factor", 1.0))

    def begin(self, job: Job, step: int) -> None:
        job.kept["factor"] = min(_MOST, _NOISE_GROWTH ** max(0, step - job.middle))


class ScaleCollapse(Fault):
    precision = "fp16"

    def begins(self, steps: int) -> int:
        return middle(steps) + 1

    def prepare(self, job: Job) -> None:
        # what a backward function does that works in half precision: beyond 65,504 it has only infinity
        _on_gradient(
            next(job.model.parameters()), lambda gradient: (gradient * job.kept.get("factor", 1.0)).half().float()
        )

    def begin(self, job: Job, step: int) -> None:
        job.kept["factor"] = min(_MOST, _OVERFLOW_GROWTH ** max(0, step - job.middle))


class Frozen(Fault):
    def begins(self, steps: int) -> int:
        return steps // 3 + 1

    def rate(self, step: int, steps: int) -> float:
        return 0.0 if step >= self.begins(steps) else 1.0


class RateJump(Fault):
    def begins(self, steps: int) -> int:
        return 2 * steps // 3 + 1

    def rate(self, step: int, steps: int) -> float:
        return 20.0 if step >= self.begins(steps) else 1.0


class WrongOptimizer(Fault):
    def trained(self, model: nn.Module) -> Sequence[nn.Parameter]:
        """All but the feed-forward layers, as if their group had been forgotten."""
        return [parameter for name, parameter in model.named_parameters() if ".feed." not in name]


class UnchangedTensor(Fault):
    def trained(self, model: nn.Module) -> Sequence[dict[str, Any]]:
        """Two groups. The learning rate of the feed-forward layers was left at zero."""
        feed = [parameter for name, parameter in model.named_parameters() if ".feed." in name]
        rest = [parameter for name, parameter in model.named_parameters() if ".feed." not in name]
        return [{"params": rest}, {"params": feed, "lr": 0.0}]


class DeadUnits(Fault):
    def prepare(self, job: Job) -> None:
        """ReLU in place of GELU, behind biases that keep nearly every unit below zero."""
        from torch import nn

        for name, module in job.model.named_modules():
            if name.endswith(".feed") and isinstance(module, nn.Sequential):
                module[1] = nn.ReLU()
                nn.init.constant_(module.get_parameter("0.bias"), _DEAD_BIAS)


class DataBug(Fault):
    def collated(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, targets.fill_(-100)


class Vanishing(Fault):
    def prepare(self, job: Job) -> None:
        for name, parameter in job.model.named_parameters():
            if "blocks.0." in name or "blocks.1." in name:
                _on_gradient(parameter, lambda gradient: gradient * 1e-10)


class DataRepeats(Fault):
    shuffles = False

    def windows(self, count: int) -> Sequence[int]:
        """Batches drawn from eight, in no order."""
        draw = random.Random(0)  # noqa: S311 - no secret
        begins = [_BATCH * draw.randrange(_REPEATED) for _ in range(count // _BATCH)]
        return [begin + place for begin in begins for place in range(_BATCH)]


class Overfit(Fault):
    def windows(self, count: int) -> Sequence[int]:
        return range(_FEW_WINDOWS)

    def end(self, job: Job, step: int, logits: Tensor) -> None:
        if step % _EVALUATED_EVERY == 0:
            evaluate(job, _HELD_OUT)


def _on_gradient(parameter: nn.Parameter, change: Callable[[Tensor], Tensor]) -> None:
    """What a backward function of a script may do to the gradient of a parameter."""
    parameter.register_hook(change)  # type: ignore[no-untyped-call]


def evaluate(job: Job, windows: int, *, repeats: int = 1) -> None:
    """The loss on windows that the model is not trained on, logged as `val/loss`."""
    import torch
    from torch.nn import functional

    import perfagent
    from perfagent_tools.demo import data

    if "held out" not in job.kept:
        held = data.Windows(data.read_sources(), 64)
        job.kept["held out"] = [held[len(held) - 1 - place] for place in range(windows)]
    job.model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for _ in range(repeats):
            for tokens, targets in job.kept["held out"]:
                logits = job.model(tokens[None])
                total += functional.cross_entropy(logits.flatten(0, 1), targets).item()
                count += 1
    job.model.train()
    perfagent.log({"val/loss": total / count})


FAULTS: tuple[Fault, ...] = (
    Nan(
        name="nan",
        story="half-way, a batch in which every token is masked: the mean over nothing is 0/0 = NaN",
        expects=("nonfinite_loss",),
    ),
    Spike(
        name="spike",
        story=f"at the end, {_SPIKE_STEPS} batches whose targets are noise (a corrupt shard of data)",
        expects=("loss_spike",),
        min_steps=300,  # the rule watches 200 steps before it judges, and compares with the 128 before
    ),
    Divergence(
        name="divergence",
        story="from half-way on, the schedule multiplies the learning rate at each step and never stops",
        expects=("loss_divergence",),
        min_steps=600,
    ),
    GradExplosion(
        name="grad-explosion",
        story="from half-way on, a backward function of the script multiplies a gradient more at each step",
        expects=("grad_norm_explosion",),
        min_steps=500,
    ),
    ScaleCollapse(
        name="scale-collapse",
        story="from half-way on, a gradient in fp16 grows and overflows, and the GradScaler halves its scale again and again",
        expects=("loss_scale_collapse",),
        min_steps=80,
    ),
    Frozen(
        name="frozen",
        story="after a third of the steps the schedule says zero: the model stands still",
        expects=("frozen_training",),
        min_steps=300,
    ),
    RateJump(
        name="rate-jump",
        story="after two thirds of the steps the learning rate is twenty times what the schedule meant",
        expects=("lr_anomaly",),
        min_steps=300,
    ),
    WrongOptimizer(
        name="wrong-optimizer",
        story="the optimizer was given all parameters but those of the feed-forward layers",
        expects=("wrong_optimizer",),
        min_steps=100,
    ),
    UnchangedTensor(
        name="unchanged-tensor",
        story="the group of the feed-forward layers in the optimizer has a learning rate of zero",
        expects=("unchanged_tensor",),
        min_steps=200,
    ),
    DeadUnits(
        name="dead-units",
        story=f"the feed-forward layers have ReLU behind biases of {_DEAD_BIAS:g}: no unit ever fires",
        expects=("dead_units",),
        min_steps=200,
    ),
    DataBug(
        name="data-bug",
        story="the length of the prompt is measured after padding, so that every label is -100, which the loss leaves out",
        expects=("data_bug",),
        min_steps=200,
    ),
    Vanishing(
        name="vanishing",
        story="next to no gradient comes through to the first two blocks",
        expects=("grad_vanishing",),
        min_steps=200,
    ),
    DataRepeats(
        name="data-repeats",
        story=f"the sampler draws the same {_REPEATED} batches again and again",
        expects=("data_repeats",),
        min_steps=100,
    ),
    Overfit(
        name="overfit",
        story=f"the model trains on {_FEW_WINDOWS} short texts until it knows them by heart",
        expects=("overfit",),
        min_steps=600,
    ),
)
