"""What torch.compile makes of functions that we watch is what it makes of them without us."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from agent.hooks.loops import sgd
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed import all_reduce as imported_earlier
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_versions import TORCH

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, as it compiles

STEPS = 4
MAX = dist.ReduceOp.MAX
IN_GRAPHS = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_reduce_imported_earlier": lambda x: imported_earlier(x, op=MAX),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(torch.empty(16), x),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.empty(4), x, op=MAX),
}
BREAKING = {
    "broadcast": lambda x: dist.broadcast(x, 0),
    "barrier": lambda x: dist.barrier(),
    "all_reduce_begun": lambda x: dist.all_reduce(x, async_op=True).wait(),
}
"""What torch.compile cannot put into a graph."""
BETWEEN = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "get_total_norm": lambda model: nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]),
    "zero_grad": lambda model: model.zero_grad() or torch.ones(1) + 1,
}


@pytest.fixture(autouse=True)
def one_of_two_ranks(nothing_compiled):
    """Of a process group that only pretends."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


class Exchanging(nn.Module):
    """A model with a collective in its forward pass."""

    def __init__(self, exchange) -> None:
        super().__init__()
        self.linear, self.exchange = nn.Linear(8, 8), exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        mean = y.detach().mean(0).clone()
        self.exchange(mean)
        return (y - mean).square().mean()


class Trained:
    """attached: never, first (before anything is compiled), or later (when a first pass has been compiled)."""

    def __init__(self, record, attached: str, *, exchange=None, between=None, whole: bool = True) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(1)
        self.graphs: list[str] = []
        self.results: list[float] = []
        model = Exchanging(exchange or (lambda x: None))
        forward = model if exchange is None else self.compiled(model, whole)
        between = between and self.compiled(between, whole)
        optimizer = sgd(model)
        for step in range(STEPS + 1):
            if step == {"first": 0, "later": 1}.get(attached):
                self.recorded = record(model, optimizer=optimizer)
            loss = forward(torch.randn(4, 8))
            loss.backward()
            self.results += [loss.item(), between(model).item() if between else 0.0]
            optimizer.step()
            optimizer.zero_grad()
        self.breaks = sum(torch._dynamo.utils.counters["graph_break"].values())

    def compiled(self, function, whole):
        def backend(graph, _examples):
            self.graphs.append(graph.code)
            return graph.forward

        return torch.compile(function, backend=backend, fullgraph=whole)


def where_warned() -> list[str]:
    """The file that the warning of a deprecated collective names: that of torch's caller of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce_coalesced([torch.ones(1)])
    return [Path(one.filename).name for one in caught]


@pytest.mark.parametrize("name", [*IN_GRAPHS, *BREAKING])
def test_collectives_keep_results_graphs_and_breaks(record, name):
    if TORCH < (2, 7) and name == "all_gather_into_tensor":
        pytest.skip("torch 2.6 cannot trace it")
    whole = name in IN_GRAPHS
    exchange = (IN_GRAPHS | BREAKING)[name]
    without = Trained(record, "never", exchange=exchange, whole=whole)
    assert (without.breaks == 0) is whole, "else the test would show nothing"
    for attached in ("first", "later"):
        seen = Trained(record, attached, exchange=exchange, whole=whole)
        assert seen.results == without.results
        assert seen.graphs == without.graphs
        # watched under its name, a barrier is another function once, and its frame is looked at again
        assert seen.breaks == without.breaks + (name == "barrier")
        assert all(pickle.loads(pickle.dumps(one)) is one for one in (dist.all_reduce, dist.monitored_barrier))
        assert where_warned() == ["c10d_logger.py"], "warnings come from where they come without us"
        waits = len(seen.recorded.of("phase/comm_s"))
        assert whole or attached == "later" or waits >= 3, "a collective at a break is timed"


@pytest.mark.parametrize("name", BETWEEN)
def test_what_comes_between_backward_and_step_is_one_graph(record, name):
    if (TORCH < (2, 11) and name != "zero_grad") or TORCH < (2, 6):
        pytest.skip("torch 2.10 cannot trace clipping, and torch 2.4 no module's zero_grad")
    without, first, later = (
        Trained(record, attached, between=BETWEEN[name]) for attached in ("never", "first", "later")
    )
    assert first.results == later.results == without.results
    assert first.graphs == without.graphs
    assert len(without.graphs) == 1
    # compiled anew at most once: a function it has in it has become another
    assert later.graphs in (without.graphs, without.graphs * 2)
    assert (first.breaks, later.breaks) == (0, 0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own, at an import
@pytest.mark.parametrize("how", ["in place", "model", "whole step"])
def test_compiled_training_has_the_same_graphs_and_all_its_steps(record, how):
    def trained(attached: bool):
        torch._dynamo.reset()
        torch.manual_seed(0)
        graphs, model = CompileCounter(), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        recorded = record(model) if attached else None
        net = torch.compile(model, backend=graphs) if how == "model" else model
        if how == "in place":
            model.compile(backend=graphs)
        optimizer = sgd(model)

        def step(x):
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = torch.compile(step, backend=graphs) if how == "whole step" else step
        return [step(torch.randn(4, 8)).item() for _ in range(6)], graphs.frame_count, recorded

    *without, _ = trained(attached=False)
    *seen, recorded = trained(attached=True)
    assert seen == without
    assert recorded.numbers("loss") == [1, 2, 3, 4, 5, 6]
    if how != "whole step":  # there the forward pass is inside a graph
        assert recorded.numbers("phase/forward_s") == [2, 3, 4, 5, 6]
