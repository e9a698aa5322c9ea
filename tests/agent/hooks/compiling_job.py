"""Trains a compiled model and prints what came of it, with or without the agent: CASE [--attach]."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

CASE, ATTACHED = sys.argv[1], "--attach" in sys.argv
LENGTHS = (*range(3, 14), *range(3, 14))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        if CASE == "breaks":
            torch._dynamo.graph_break()
        return self.linear(hidden).square().mean()


class OnlyAppends:
    """Where a torch that keeps its records in another way would put them."""

    def append(self, record: Any) -> None: ...


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    run = None
    if ATTACHED:
        import perfagent
        from perfagent.boundary import guard

        run = perfagent.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = model if CASE == "plain" else torch.compile(model, backend="aot_eager", dynamic=False)
    if CASE == "other_torch":
        from torch._dynamo import utils

        utils._compilation_metrics = OnlyAppends()  # type: ignore[assignment]
    losses = []
    for length in LENGTHS if CASE != "breaks" else (3,) * 6:
        optimizer.zero_grad()
        loss = trained(torch.arange(2 * length).reshape(2, length) % 10)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    told: dict[str, Any] = {"losses": losses}
    if CASE != "plain":
        from torch._dynamo.utils import counters

        told["counters"] = {name: dict(counters[name]) for name in ("stats", "frames", "graph_break", "aot_autograd")}
    if run is not None:
        run.finish()
        told["failures"] = guard.failures
    print(json.dumps(told))


main()
