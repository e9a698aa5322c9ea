"""What a fault of the demo is: a story, what it must end in, and the places of the training loop where it acts.

Light on purpose: the command line imports the faults without torch; only the training process calls their hooks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["Fault", "Job", "middle"]

_FIRST_STEPS, _USUAL_STEPS = 3, 30


def middle(steps: int) -> int:
    return max(3, steps // 2)


@dataclass(slots=True)
class Job:
    """The training job that a fault acts on. kept: what a fault wants to remember between steps; begun: when each step
    began, monotonic seconds."""

    model: nn.Module
    optimizer: Optimizer
    rank: int
    steps: int
    kept: dict[str, Any]
    begun: list[float] = field(default_factory=list)

    @property
    def usual_s(self) -> float:
        """What a step of the first half of the run takes, after the first ones: the median of the newest."""
        begun = self.begun[_FIRST_STEPS : self.middle][-_USUAL_STEPS:]
        times = sorted(after - before for before, after in itertools.pairwise(begun))
        return times[len(times) // 2] if times else 0.1

    @property
    def middle(self) -> int:
        return middle(self.steps)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """story: what happens, in words. expects: the rules of which one must be the verdict. states: how the run may end.
    min_steps: the fewest steps in which it stands out from noise. settle_s: how long the verdict may take after the
    end. ranks: how many processes train together. launcher: whether `perfagent run` starts them, whose watcher sees a
    signal at once; a bare process shows as lost 30 s later. ends: after its steps; or not before the verdict came, and
    then by itself ("at the verdict") or because somebody stops it ("when stopped"). verdict_s: how long that verdict
    takes at most; usual_s: how long it usually takes. precision: of the loop; shuffles: whether its data is shuffled.

    Its methods are called by the job (job.py); without a fault they change nothing. Steps count from 1.
    """

    name: str
    story: str
    expects: tuple[str, ...]
    states: tuple[str, ...] = ("finished",)
    min_steps: int = 10
    settle_s: float = 20.0
    ranks: int = 1
    launcher: bool = False
    ends: Literal["after its steps", "at the verdict", "when stopped"] = "after its steps"
    verdict_s: float = 0.0
    usual_s: float = 0.0
    precision: ClassVar[str] = "fp32"
    shuffles: ClassVar[bool] = True

    def begins(self, steps: int) -> int:
        """The step from which on something is wrong, in a run of so many steps."""
        return 1

    def windows(self, count: int) -> Sequence[int]:
        """Which of the text's windows an epoch has."""
        return range(count)

    def trained(self, model: nn.Module) -> Sequence[Any]:
        """The parameters that the optimizer gets, or its groups of them."""
        return list(model.parameters())

    def prepare(self, job: Job) -> None:
        """Before the first step."""

    def collated(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """A batch as the loader puts it together."""
        return tokens, targets

    def rate(self, step: int, steps: int) -> float:
        """By how much the learning rate of a step is off: 1 is right."""
        return 1.0

    def begin(self, job: Job, step: int) -> None:
        """Before a step."""

    def batch(self, job: Job, step: int, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The batch of a step, as it is used."""
        return tokens, targets

    def forward(self, job: Job, step: int) -> None:
        """In the forward pass."""

    def loss(self, job: Job, step: int, token_losses: Tensor) -> Tensor:
        """The loss of a step, from the losses of its tokens."""
        return token_losses.mean()

    def end(self, job: Job, step: int, logits: Tensor) -> None:
        """After a step."""
