"""One of two ranks, of a process group that only pretends, trains with collectives and clipping in compiled
functions."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import RecordingSender
from torch import nn
from torch.distributed import all_reduce as imported_earlier
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfagent.boundary import guard
from perfagent.session import Run

STEPS = 4


class Exchanging(nn.Module):
    """A model with a collective in its forward pass."""

    def __init__(self, exchange: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.exchange = nn.Linear(8, 8), exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        mean = y.detach().mean(0).clone()
        self.exchange(mean)
        return (y - mean).square().mean()


def gathered(x: torch.Tensor) -> None:
    dist.all_gather_into_tensor(torch.empty(16), x)


def scattered(x: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(torch.empty(4), x, op=dist.ReduceOp.MAX)


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce_of_an_operation": lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX),
    "all_reduce_imported_earlier": lambda x: imported_earlier(x, op=dist.ReduceOp.MAX),
    "all_gather_into_tensor": gathered,
    "reduce_scatter_tensor": scattered,
}
BREAKING: dict[str, Callable[[torch.Tensor], Any]] = {
    "broadcast": lambda x: dist.broadcast(x, 0),
    "barrier": lambda x: dist.barrier(),
    "all_reduce_begun": lambda x: dist.all_reduce(x, async_op=True).wait(),
}
"""What torch.compile cannot put into a graph."""


def clip(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def norm(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])


def clear(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    return torch.ones(1) + 1


BETWEEN: dict[str, Callable[[nn.Module], Any]] = {"clip_grad_norm_": clip, "get_total_norm": norm, "zero_grad": clear}


def compiled(function: Any, graphs: list[str], *, whole: bool) -> Any:
    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=whole)


def where_warned() -> list[str]:
    """The file that the warning of a deprecated collective names: that of torch's caller of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce_coalesced([torch.ones(1)])
    return [Path(one.filename).name for one in caught]


def train(name: str, folder: Path, *, whole: bool, attached: str) -> dict[str, Any]:
    """attached: never, first (before anything is compiled), or later (when a first pass has been compiled)."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(1)
    graphs: list[str] = []
    exchange, between = {**COLLECTIVES, **BREAKING}.get(name), BETWEEN.get(name)
    model = Exchanging(exchange or (lambda x: None))
    forward = model if exchange is None else compiled(model, graphs, whole=whole)
    between = None if between is None else compiled(between, graphs, whole=whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sender = RecordingSender(folder)
    run = Run(sender.config, name=None, config={}, tags=[], group=None, start_step=None, sender=sender)  # type: ignore[arg-type]
    losses = []
    for step in range(STEPS + 1):
        if step == (1 if attached == "later" else 0) and attached != "never":
            run.take_up(model, optimizer, {}, [])
            run.start()
        loss = forward(torch.randn(4, 8))
        loss.backward()
        told = None if between is None else between(model)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item().hex(), None if told is None else told.item().hex()]
    said = {"losses": losses, "graphs": graphs, "breaks": sum(torch._dynamo.utils.counters["graph_break"].values())}
    if attached == "never":
        return said
    same = [pickle.loads(pickle.dumps(one)) is one for one in (dist.all_reduce, dist.broadcast, dist.monitored_barrier)]
    places = where_warned()
    run.finish()
    rows = [values for _, values in sender.drain() if "lr" in values]
    waits = sum("phase/comm_s" in values for values in rows)
    return {**said, "same": same, "places": places, "waits": waits, "failures": dict(guard.failures)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    told = {
        name: {
            word: train(name, folder / "run", whole=name not in BREAKING, attached=word)
            for word in ("never", "first", "later")
        }
        for name in (*COLLECTIVES, *BREAKING, *BETWEEN)
    }
    (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
