"""Two ranks train with gradients exchanged in several ways; rank 1 is late in a known place. Each writes what it would
send."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import RecordingSender
from torch import nn
from torch.distributed.fsdp import fully_shard

from perfagent.boundary import guard
from perfagent.session import Run

STEPS = 4
LATE_S = 0.2
late_s = 0.0


class LateBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(late_s)
        return gradient


def by_hand(made: nn.Module) -> None:
    for parameter in made.parameters():
        dist.all_reduce(parameter.grad)


def by_hand_at_once(made: nn.Module) -> None:
    for work in [dist.all_reduce(parameter.grad, async_op=True) for parameter in made.parameters()]:
        work.wait()


def wrapped(kind: str, made: nn.Module) -> nn.Module:
    if kind == "fsdp2":
        fully_shard(made)
    if not kind.startswith("ddp"):
        return made
    parallel = nn.parallel.DistributedDataParallel(made)
    parallel.require_backward_grad_sync = kind == "ddp"
    return parallel


KINDS = {
    "ddp": None,
    "ddp_without_exchange": None,
    "fsdp2": None,
    "by_hand": by_hand,
    "by_hand_at_once": by_hand_at_once,
}


def patched() -> tuple[Any, ...]:
    """What the hooks replace: of a collective, the function inside of torch's wrapper."""
    return dist.all_reduce.__closure__[0].cell_contents, dist.distributed_c10d.Work.wait, torch.autograd.backward


def train(kind: str, folder: Path, *, monitored: bool) -> dict[str, Any]:
    global late_s
    late_s = LATE_S if monitored and dist.get_rank() == 1 else 0.0
    sender = RecordingSender(folder / f"{dist.get_rank()}")
    torch.manual_seed(1)
    made = wrapped(kind, nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
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
        if exchange := KINDS[kind]:
            exchange(made)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    watched = [one is not other for one, other in zip(patched(), before, strict=True)]
    if monitored:
        run.finish()
    rows = [(step, dict(values)) for step, values in sender.drain() if "lr" in values]
    restored = patched() == before
    return {
        "rows": rows, "losses": losses, "failures": dict(guard.failures), "restored": restored, "watched": watched,
    }  # fmt: skip


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    told = {
        kind: {word: train(kind, folder, monitored=word == "with") for word in ("without", "with")} for kind in KINDS
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
