"""Checkpointed blocks inside the loop, DDP and FSDP2, in a process group of one rank; what two ranks do is the
wrappers' own."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from process_groups import alone_in_group
from torch import nn

import perfagent
from perfagent.training.compute.activation import checkpoint_activations


@pytest.fixture
def alone() -> Iterator[None]:
    with alone_in_group():
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.dropout(self.norm(self.up(x)).relu(), 0.1, self.training))


def trained(model, wrap, mode):
    """Weights, statistics and losses after three optimizer steps of two micro-steps each, by perfagent.loop."""
    model = copy.deepcopy(model)
    if mode:
        checkpoint_activations(model, mode)
    model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = perfagent.loop(model, optimizer, grad_accum=2, clip_norm=1.0)
    torch.manual_seed(7)
    losses = []
    for batch in loop.batches(list(torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1)))):
        with loop.forward():
            loss = model(batch).square().mean()
        loop.backward(loss)
        loop.step()
        losses.append(loss.item())
    state = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in model.state_dict().items()
    }
    return losses, state


WRAPS = {"plain": lambda model: model, "ddp": perfagent.ddp, "fsdp": perfagent.fsdp}


@pytest.mark.parametrize("mode", ["all", "every:2", "selective"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_wrapped_models_train_the_same_with_checkpointed_blocks(alone, wrap, mode):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    plain, checkpointed = trained(model, WRAPS[wrap], None), trained(model, WRAPS[wrap], mode)
    assert plain[0] == checkpointed[0]
    assert plain[1].keys() == checkpointed[1].keys()
    assert all(torch.equal(plain[1][name], checkpointed[1][name]) for name in plain[1])
    counts = [value for name, value in checkpointed[1].items() if name.endswith("num_batches_tracked")]
    assert [int(count) for count in counts] == [6, 6, 6]
