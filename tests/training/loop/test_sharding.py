"""What is wrapped how, as far as one process can tell; two ranks are in test_ranks.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from process_groups import alone_in_group
from torch import nn

import perfagent
from perfagent.errors import ConfigError
from perfagent_loop.fsdp import blocks_of


@pytest.fixture
def alone() -> Iterator[None]:
    with alone_in_group():
        yield


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.ModuleDict(
            {"layers": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])}
        )
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.body["layers"]:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def test_blocks_are_the_items_of_outermost_lists_of_like_modules() -> None:
    model = Transformer()
    assert blocks_of(model) == [*model.body["layers"]]
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []  # not alike
    assert blocks_of(nn.ModuleDict({"acts": nn.ModuleList([nn.ReLU(), nn.ReLU()])})) == []  # nothing to shard


def test_each_block_is_a_shard_in_the_precision_asked_for(alone: None) -> None:
    from torch.distributed.fsdp import FSDPModule

    model = perfagent.fsdp(Transformer(), precision="bf16")
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert sharded == ["", "body.layers.0", "body.layers.1", "body.layers.2"]
    assert model(torch.tensor([1])).dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    by_kind = perfagent.fsdp(Transformer(), blocks=[nn.Embedding])
    assert isinstance(by_kind.embedding, FSDPModule)
    assert not isinstance(by_kind.body["layers"][0], FSDPModule)


def test_what_cannot_be_sharded_is_refused_with_what_can(alone: None) -> None:
    with pytest.raises(ConfigError, match="7 Linear"):
        perfagent.fsdp(Transformer(), blocks=[nn.Conv1d])
    with pytest.raises(ConfigError, match="keep them in float32"):
        perfagent.fsdp(Transformer().bfloat16(), precision="bf16")
    with pytest.raises(ConfigError, match="no GPU here"):
        perfagent.fsdp(Transformer(), offload=True)
    with pytest.raises(ConfigError, match="fp32, bf16, fp16"):
        perfagent.fsdp(Transformer(), reduce="int8")  # type: ignore[arg-type]


def test_options_of_ddp_reach_it_and_impossible_ones_are_refused(alone: None) -> None:
    wrapped = perfagent.ddp(Transformer(), bucket_mb=50, static_graph=True)
    assert (wrapped.bucket_bytes_cap, wrapped.static_graph, wrapped.gradient_as_bucket_view) == (50 * 2**20, True, True)
    with pytest.raises(ConfigError, match="wrapped by DistributedDataParallel already"):
        perfagent.ddp(wrapped)
    with pytest.raises(ConfigError, match="above 0"):
        perfagent.ddp(Transformer(), bucket_mb=0)
    with pytest.raises(ConfigError, match="requires a gradient"):
        perfagent.ddp(Transformer().requires_grad_(False))


def test_a_model_of_which_only_a_part_is_sharded_is_refused(alone: None) -> None:
    model = Transformer()
    perfagent.fsdp(model.head)
    with pytest.raises(ConfigError, match=r"embedding\.weight"):  # nobody would average its gradients over the ranks
        perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    assert perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.1)).strategy.kind == "fsdp2"
