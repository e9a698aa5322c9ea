"""Where a NaN on a device came from, though no value of it is ever waited for: most losses arrive before the update of
their step, some of them only steps later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from agent.causes.conftest import Made, linears
from fake_accelerator import Control
from torch import Tensor, nn

DEVICE, BAD = "fakegpu:0", 6


def two_layers(between: Callable[[Tensor], Tensor] = torch.tanh) -> nn.Module:
    model = Made(lambda self, x: self.head(self.between(self.inner(x))), **linears("inner", "head"))
    model.between = between
    return model


@dataclass
class Job:
    """A training that reads no loss. late: the losses of the step before BAD, and of so many from it on, arrive together. spoils:
    before each step, which has this number."""

    fakegpu: Control
    late: int = 0
    spoils: Callable[[Job, int], object] = lambda job, step: None
    model: nn.Module = field(default_factory=two_layers)
    loss_of: Callable[[Tensor], Tensor] = lambda error: error.square().mean()
    scaler: Any = None

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.model.to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[Tensor] = []
        steps = BAD + self.late + 6
        self.batches = [(torch.randn(6, 8).to(DEVICE), torch.randn(6, 4).to(DEVICE)) for _ in range(steps)]

    def steps(self, look: Callable[[], None] = lambda: None) -> list[Tensor]:
        for step, (x, y) in enumerate(self.batches, 1):
            self.spoils(self, step)
            self.fakegpu.hold()
            with torch.autocast("fakegpu", torch.float16, enabled=self.scaler is not None):
                loss = self.loss_of(self.model(x).float() - y)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            if not self.late or not BAD - 1 <= step < BAD + self.late:
                self.fakegpu.let_go()
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
            look()
        self.fakegpu.let_go()
        return self.losses

    def evidence(self, record: Any) -> dict[str, Any]:
        recorded = record(self.model)

        def look() -> None:
            recorded.rows += recorded.sender.drain()
            recorded.sender.progress.links.investigator.poll()

        self.steps(look)
        [found] = [data for kind, data, _ in recorded.sender.events if kind == "finding"]
        return {**found["evidence"]}


def bad_batch(job: Job, step: int) -> None:
    if step == BAD:
        job.batches[step - 1][0][2, 3] = math.nan


def log_of_nothing(job: Job, step: int) -> None:
    job.loss_of = lambda error: (
        error.abs().mean() + (error.detach().abs().mean() * (step != BAD) + 0 * error.mean()).log()
    )


def root_of_nothing(job: Job, step: int) -> None:
    """Its value is right, its slope is not."""
    job.model.between = lambda hidden: (hidden.square() * float(step != BAD)).sqrt()


def too_far(job: Job, step: int) -> None:
    job.optimizer.param_groups[0]["lr"] = 1e20 if step == BAD - 1 else 1e-2


def too_large_for_half(job: Job, step: int) -> None:
    job.model.between = torch.relu
    with torch.no_grad():
        job.model.inner.weight.abs_()
    if step >= BAD:
        job.batches[step - 1][0].fill_(6e4)


FOUND = {
    bad_batch: {"cause": "batch", "batch_tensor": "x", "batch_step": BAD},
    log_of_nothing: {"cause": "operator", "operator": "Log", "after_module": "head"},
    root_of_nothing: {"cause": "backward", "parameter": "inner.bias", "good_from": "head.weight", "step": BAD + 1},
    too_far: {"cause": "forward"},
    too_large_for_half: {"cause": "module", "operator": "Addmm", "module": "inner"},
}


LATE = {
    bad_batch: {"cause": "batch", "batch_tensor": "0", "batch_step": BAD},
    log_of_nothing: FOUND[log_of_nothing],
    root_of_nothing: FOUND[root_of_nothing],
    too_far: {"cause": "spread"},
}
"""Of a loss that arrives steps later, and not before its update."""


@pytest.mark.parametrize(("late", "spoils"), [*((0, spoils) for spoils in FOUND), *((5, spoils) for spoils in LATE)])
def test_a_loss_on_a_device_has_a_cause(fakegpu: Control, record: Any, late: int, spoils: Any) -> None:
    scaler = torch.amp.GradScaler("fakegpu") if spoils is too_large_for_half else None
    evidence = Job(fakegpu, late, spoils, scaler=scaler).evidence(record)
    expected = {"step": BAD, **(LATE if late else FOUND)[spoils]}
    operator = evidence.get("operator", {}).get("operator")
    assert {name: operator if name == "operator" else evidence.get(name) for name in expected} == expected
    assert evidence["began"]["last"] == BAD
    if not late:
        assert evidence["began"] == {
            "first": BAD,
            "last": BAD,
            **({"by": "gradient"} if spoils is root_of_nothing else {}),
        }


@pytest.mark.parametrize("late", [0, 5])
def test_looking_into_a_device_changes_and_awaits_nothing(fakegpu: Control, record: Any, late: int) -> None:
    counted, losses = [], []
    for is_watched in (False, True):
        torch.manual_seed(3)
        job = Job(fakegpu, late, root_of_nothing)
        fakegpu.forget_counts()
        if is_watched:
            assert job.evidence(record)
        else:
            job.steps()
        found = fakegpu.counts()
        counted.append((found.scalar_reads, found.synchronizations, found.waits))
        losses.append([loss.item().hex() for loss in job.losses])
    assert counted[0] == counted[1] == (0, 0, 0)
    assert losses[0] == losses[1]


def test_a_guard_that_raises_on_a_device_is_looked_into(fakegpu: Control, record: Any) -> None:
    job = Job(fakegpu)
    recorded = record(job.model)
    job.steps()
    with pytest.raises(FloatingPointError) as raised:
        loss = (job.model(job.batches[0][0]) * 0).log().mean()
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is no number")
    recorded.run.fail(raised.value)
    [found] = [data for kind, data, _ in recorded.sender.events if kind == "finding"]
    assert (found["evidence"]["cause"], found["evidence"]["operator"]["operator"]) == ("operator", "Log")
