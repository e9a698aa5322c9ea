"""Where a NaN on a device came from, though no value of it is ever waited for: most losses arrive before the update of
their step, some of them only steps later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from agent.rootcause.conftest import Made, linears
from fake_accelerator import Control
from torch import Tensor, nn

DEVICE, BAD = "fakegpu:0", 6


def two_layers(between: Callable[[Tensor], Tensor] = torch.tanh) -> nn.Module:
    model = Made(lambda self, x: self.head(self.between(self.inner(x))), **linears("inner", "head"))
    model.between = between
    return model


@dataclass
class Job:
    """A training that reads no loss. late: so many steps after step BAD have begun before a loss arrives again. spoils:
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
            if not BAD <= step < BAD + self.late:
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


def shown(evidence: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    operator = evidence.get("operator", {}).get("operator")
    return {name: operator if name == "operator" else evidence.get(name) for name in expected}


@pytest.mark.parametrize("spoils", FOUND, ids=lambda spoils: spoils.__name__)
def test_a_loss_that_arrives_before_its_update_has_a_cause(fakegpu: Control, record: Any, spoils: Any) -> None:
    scaler = torch.amp.GradScaler("fakegpu") if spoils is too_large_for_half else None
    evidence = Job(fakegpu, spoils=spoils, scaler=scaler).evidence(record)
    expected = {"step": BAD, **FOUND[spoils]}
    assert shown(evidence, expected) == expected, evidence
    assert evidence["began"] == {"first": BAD, "last": BAD, **({"by": "gradient"} if spoils is root_of_nothing else {})}
