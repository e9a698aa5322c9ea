"""Two ranks over gloo: data parallel and fully sharded. The truth about the norm is a single process's on the joined
batches."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from models import Points, classifier
from script import Script, norm_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

with contextlib.suppress(ImportError):  # before torch 2.6; before 2.7 it runs on GPUs alone
    from torch.distributed.fsdp import fully_shard

BATCH, STEPS = 4, 6


def alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int, *, windows: int = 1, clip: float = 0.0
) -> list[float]:
    """Norms of a single process that trains on the batches of all ranks joined."""
    data, norms = Points(BATCH * ranks * STEPS * windows), []
    samplers = [DistributedSampler(data, ranks, rank, shuffle=False) for rank in range(ranks)]
    parts = [list(sampler) for sampler in samplers]
    for step in range(STEPS):
        for window in range(windows):
            at = (step * windows + window) * BATCH
            joined = [index for part in parts for index in part[at : at + BATCH]]
            (nn.functional.cross_entropy(model(data.x[joined]), data.y[joined]) / windows).backward()
        norms.append(norm_of(model.parameters()))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def batches(script: Script, windows: int = 1) -> DataLoader:
    data = Points(BATCH * script.ranks * STEPS * windows)
    return DataLoader(
        data, batch_size=BATCH, sampler=DistributedSampler(data, script.ranks, script.rank, shuffle=False)
    )


def pair() -> tuple[nn.Module, nn.Module]:
    """The model, and one like it for the single process."""
    model = classifier(dropout=0.0)
    return model, copy.deepcopy(model)


def follow(
    script: Script,
    net: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    norms: list[float],
    lr: float,
    between: Callable[[], object] = lambda: None,
) -> None:
    """One step for each norm. between: what comes between the backward pass and the step."""  # fmt: skip
    for (x, y), norm in zip(batches(script), norms, strict=True):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        between()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        script.step(loss=loss.item(), lr=lr, norm=norm, samples=BATCH)
    script.produced(net)


def data_parallel(script: Script, compiled: str = "") -> None:
    """DistributedDataParallel; perhaps compiled."""
    model, other = pair()
    norms = alone(other, torch.optim.AdamW(other.parameters(), lr=1e-2), script.ranks)
    wrapped = DistributedDataParallel(model)
    net = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    script.attach(net, optimizer)
    follow(script, net, [optimizer], norms, 1e-2)


def data_parallel_accumulation(script: Script) -> None:
    """DistributedDataParallel with no_sync on all but the last micro-batch of a window; clipped."""
    model, other = pair()
    norms = alone(other, torch.optim.SGD(other.parameters(), lr=0.1), script.ranks, windows=2, clip=0.5)
    script.attach()
    net = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = iter(batches(script, 2))
    for norm in norms:
        with net.no_sync():
            x, y = next(loader)
            first = nn.functional.cross_entropy(net(x), y) / 2
            first.backward()
        x, y = next(loader)
        second = nn.functional.cross_entropy(net(x), y) / 2
        second.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        script.step(loss=first.item() + second.item(), lr=0.1, norm=norm, samples=2 * BATCH)
    script.produced(net)


def fully_sharded(script: Script, clip: str = "") -> None:
    """FSDP2: every layer of the model sharded by itself, then the whole."""
    model, other = pair()
    limit = float(clip or 0)
    norms = alone(other, torch.optim.AdamW(other.parameters(), lr=1e-2), script.ranks, clip=limit)
    script.attach()
    mesh = dist.device_mesh.init_device_mesh("cpu", (script.ranks,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    clipped = functools.partial(nn.utils.clip_grad_norm_, model.parameters(), limit)
    follow(script, model, [optimizer], norms, 1e-2, clipped if limit else lambda: None)


def fully_sharded_in_parts(script: Script) -> None:
    """FSDP2, with an optimizer for the matrices and one for the rest; the large one steps first."""
    model, other = pair()
    norms = alone(other, torch.optim.SGD(other.parameters(), lr=0.1), script.ranks)
    script.attach()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (script.ranks,)))
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is large] for large in (True, False))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(part, lr=0.1) for part in (matrices, rest)]
    follow(script, model, optimizers, norms, 0.1)


def fully_sharded_beside_replicated(script: Script) -> None:
    """FSDP2 that leaves the biases to the script, which averages their gradients; an optimizer of their own for
    them."""
    model, other = pair()
    norms = alone(other, torch.optim.SGD(other.parameters(), lr=0.1), script.ranks)
    script.attach()
    biases = [p for p in model.parameters() if p.dim() == 1]
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (script.ranks,)), ignored_params=set(biases))
    matrices = [p for p in model.parameters() if p.dim() == 2]

    def averaged() -> None:
        for bias in biases:
            dist.all_reduce(bias.grad)
            bias.grad /= script.ranks

    follow(script, model, [torch.optim.SGD(part, lr=0.1) for part in (matrices, biases)], norms, 0.1, averaged)


def first_version(script: Script, strategy: str = "FULL_SHARD", clip: str = "") -> None:
    """FSDP's first version; perhaps clipped by its own method."""
    model, other = pair()
    limit = float(clip or 0)
    norms = alone(other, torch.optim.AdamW(other.parameters(), lr=1e-2), script.ranks, clip=limit)
    net = FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=ShardingStrategy[strategy]
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    script.attach(net, optimizer)
    follow(script, net, [optimizer], norms, 1e-2, lambda: net.clip_grad_norm_(limit) if limit else None)
