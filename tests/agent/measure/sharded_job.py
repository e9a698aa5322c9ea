"""Two ranks train models whose gradients are sharded in several ways; each writes what it would send, and the true
norms."""

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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from perfagent.boundary import guard
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


def fsdp1(**options: Any) -> nn.Module:
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True, **options)


def fsdp1_flat() -> nn.Module:
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"))


def fsdp1_with_a_replicated_layer() -> nn.Module:
    made = model()
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(made, ignored_modules=[made[1]], **options)


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(model())


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        fsdp2, fsdp2_with_a_replicated_parameter, hybrid, tensor_parallel, fsdp1, fsdp1_flat, fsdp1_with_a_replicated_layer, ddp,
    )
} | {"two optimizers": fsdp2_with_a_replicated_parameter, "clipped, fsdp1": fsdp1}  # fmt: skip


def is_piece(parameter: Any) -> bool:
    return hasattr(parameter, "device_mesh") or hasattr(parameter, "_fsdp_flattened")


def whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def square_of(parameter: Any) -> float:
    """Of the whole gradient, of which FSDP's first version gives each rank a piece and no way to the rest."""
    flat = hasattr(parameter, "_fsdp_flattened")
    gradient = torch.zeros(1) if parameter.grad is None else whole(parameter.grad)
    square = gradient.double().square().sum()
    if flat:
        dist.all_reduce(square)
    return float(square)


def optimizers_of(made: nn.Module, *, two: bool) -> list[torch.optim.Optimizer]:
    """two: one for what is sharded, and one for what every rank has."""
    parameters = list(made.parameters())
    parts = [[p for p in parameters if is_piece(p) is sharded] for sharded in (True, False)] if two else [parameters]
    return [torch.optim.AdamW(part, lr=1e-2) for part in parts]


def train(name: str, folder: Path, *, monitored: bool) -> dict[str, Any]:
    made, same_data = KINDS[name](), name == "tensor_parallel"
    rank = dist.get_rank()
    sender = RecordingSender(folder / f"{rank}", overhead_budget_pct=1e9)
    run = Run(sender.config, name=None, config={}, tags=[], group=None, start_step=None, sender=sender)  # type: ignore[arg-type]
    run._progress.links.rank = rank
    run._progress.links.gradient_schedule.deeper = 1
    trained = optimizers_of(made, two=name == "two optimizers")
    if monitored:
        run.take_up(made, None if len(trained) > 1 else trained[0], {}, [])
        run.start()
    torch.manual_seed(7 if same_data else 7 + rank)
    norms, layers, losses = [], [], []
    for _ in range(STEPS):
        loss = made(torch.randn(4, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())
        # what nothing shards, nothing reduces either: that is the script's own affair
        for parameter in made.parameters():
            if not is_piece(parameter) and not same_data:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        squares = {name: square_of(p) for name, p in made.named_parameters()}
        norms.append(sum(squares.values()) ** 0.5)
        plain = {
            name.removeprefix("module.").replace("_fsdp_wrapped_module.", ""): square
            for name, square in squares.items()
        }
        layers.append({name: square**0.5 for name, square in plain.items()})
        if name.startswith("clipped"):
            made.clip_grad_norm_(0.05)
        for optimizer in trained:
            optimizer.step()
        for optimizer in trained:
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
    said = {name: {how: train(name, folder, monitored=how == "with") for how in ("with", "without")} for name in KINDS}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
