"""Two ranks train with gradients exchanged in several ways; rank 1 is late in a known place. Each writes what it would
send."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import RecordingSender
from torch import nn
from torch.distributed.fsdp import fully_shard

from perfagent.boundary import guard
from perfagent.session import Run

STEPS = 5
LATE_S = 0.2


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def late() -> float:
    """Rank 1 comes late, from the second step on, when the hooks are in."""
    began = time.perf_counter()
    if dist.get_rank() == 1:
        time.sleep(LATE_S)
    return time.perf_counter() - began


class LateBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        late()
        return gradient


def ddp(made: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    return nn.parallel.DistributedDataParallel(made), lambda _: None


def ddp_without_exchange(made: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    parallel = nn.parallel.DistributedDataParallel(made)
    parallel.require_backward_grad_sync = False
    return parallel, lambda _: None


def fsdp2(made: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    fully_shard(made)
    return made, lambda _: None


def by_hand(made: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    def exchange(one: nn.Module) -> None:
        for parameter in one.parameters():
            dist.all_reduce(parameter.grad)

    return made, exchange


def by_hand_at_once(made: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    def exchange(one: nn.Module) -> None:
        works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in one.parameters()]
        for work in works:
            work.wait()

    return made, exchange


KINDS = (ddp, ddp_without_exchange, fsdp2, by_hand, by_hand_at_once)


def patched() -> tuple[Any, ...]:
    """What the hooks replace: of a collective, the function inside of torch's wrapper."""
    return dist.all_reduce.__closure__[0].cell_contents, dist.distributed_c10d.Work.wait, torch.autograd.backward


def train(kind: Callable[[nn.Module], Any], folder: Path, *, monitored: bool) -> dict[str, Any]:
    sender = RecordingSender(folder / f"{dist.get_rank()}")
    made, exchange = kind(model())
    before = patched()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    run = Run(sender.config, name=None, config={}, tags=[], group=None, start_step=None, sender=sender)  # type: ignore[arg-type]
    if monitored:
        run.take_up(made, optimizer, {}, [])
        run.start()
    torch.manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = LateBackward.apply(made(torch.randn(8, 16))).square().mean()
        loss.backward()
        exchange(made)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    watched = [one is not other for one, other in zip(patched(), before, strict=True)]
    if monitored:
        run.finish()
    rows = [(step, dict(values)) for step, values in sender.drain() if "lr" in values]
    return {
        "rows": rows,
        "losses": losses,
        "failures": dict(guard.failures),
        "restored": patched() == before,
        "watched": watched,
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = {
        kind.__name__: {word: train(kind, folder, monitored=word == "with") for word in ("without", "with")}
        for kind in KINDS
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
