"""Two ranks train models whose gradients are sharded in several ways; each writes what it would send, and the true norms."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builders import RecordingSender
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from perfagent.hooks import guard
from perfagent.session import Run

STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.ReLU(), nn.Linear(7, 3))  # 7 and 3 rows: uneven shards


def fsdp2() -> nn.Module:
    made = model()
    fully_shard(made)
    return made


def fsdp2_with_a_replicated_parameter() -> nn.Module:
    made = model()
    fully_shard(made, ignored_params={made[3].bias})
    return made


def hybrid() -> nn.Module:
    made = model()
    fully_shard(made, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    return made


def tensor_parallel() -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(made, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return made


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(model())


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (fsdp2, fsdp2_with_a_replicated_parameter, hybrid, tensor_parallel, ddp)
}


def whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def train(made: nn.Module, folder: Path, *, same_data: bool, monitored: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    sender = RecordingSender(folder / f"{rank}", overhead_budget_pct=1e9)
    run = Run(sender.config, name=None, config={}, tags=[], group=None, start_step=None, sender=sender)  # type: ignore[arg-type]
    run._progress.health.rank = rank
    run._progress.health.deeper = 1
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    if monitored:
        run.take_up(made, optimizer, {}, [])
        run.start()
    torch.manual_seed(7 if same_data else 7 + rank)
    norms, layers, losses = [], [], []
    for _ in range(STEPS):
        loss = made(torch.randn(4, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())
        for parameter in made.parameters():  # what nothing shards, nothing reduces either: that is the script's own affair
            if not hasattr(parameter, "device_mesh") and not same_data:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        squares = {name: whole(p.grad).double().square().sum().item() for name, p in made.named_parameters()}
        norms.append(sum(squares.values()) ** 0.5)
        layers.append({name.removeprefix("module."): square**0.5 for name, square in squares.items()})
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
    weights = [whole(p).detach().flatten().tolist() for p in made.parameters()]
    rows = sender.drain() if monitored else []
    said = {"rows": rows, "norms": norms, "layers": layers, "losses": losses, "weights": weights}
    return said | {"failures": dict(guard.failures)}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said = {
        name: {
            how: train(made(), folder, same_data=made is tensor_parallel, monitored=how == "with") for how in ("with", "without")
        }
        for name, made in KINDS.items()
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
