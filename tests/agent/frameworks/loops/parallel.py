"""Two ranks over gloo: data parallel and fully sharded."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from models import Points, classifier
from script import Script, norm_of, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

with contextlib.suppress(ImportError):  # before torch 2.6; before 2.7 it runs on GPUs alone
    from torch.distributed.fsdp import fully_shard

BATCH, STEPS = 4, 6


def batches(script: Script, windows: int = 1) -> DataLoader:
    data = Points(BATCH * script.ranks * STEPS * windows)
    return DataLoader(
        data, batch_size=BATCH, sampler=DistributedSampler(data, script.ranks, script.rank, shuffle=False)
    )


def data_parallel(script: Script, compiled: str = "") -> None:
    """DistributedDataParallel; perhaps compiled."""
    wrapped = DistributedDataParallel(classifier(dropout=0.0))
    net = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    script.attach(net, optimizer)
    train(script, net, [optimizer], batches(script))


def data_parallel_accumulation(script: Script) -> None:
    """DistributedDataParallel with no_sync on all but the last micro-batch of a window; clipped."""
    script.attach()
    net = DistributedDataParallel(classifier(dropout=0.0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = iter(batches(script, 2))
    for _ in range(STEPS):
        losses = []
        for context in (net.no_sync(), contextlib.nullcontext()):
            x, y = next(loader)
            with context:
                loss = nn.functional.cross_entropy(net(x), y) / 2
                loss.backward()
            losses.append(loss.item())
        norm = norm_of(net.parameters())
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        script.step(loss=sum(losses), lr=0.1, norm=norm, samples=2 * BATCH)
    script.produced(net)


def fully_sharded(script: Script, clip: str = "") -> None:
    """FSDP2: every layer of the model sharded by itself, then the whole."""
    script.attach()
    model = classifier(dropout=0.0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (script.ranks,))
    for part in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
        fully_shard(part, mesh=mesh)
    train(script, model, [torch.optim.AdamW(model.parameters(), lr=1e-2)], batches(script), clip=float(clip or 0))


def fully_sharded_in_parts(script: Script) -> None:
    """FSDP2, with an optimizer for the matrices and one for the rest; the large one steps first."""
    script.attach()
    model = classifier(dropout=0.0)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (script.ranks,)))
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is large] for large in (True, False))
    train(script, model, [torch.optim.SGD(part, lr=0.1) for part in (matrices, rest)], batches(script))


def fully_sharded_beside_replicated(script: Script) -> None:
    """FSDP2 that leaves the biases to the script, which averages their gradients; an optimizer of their own for
    them."""
    script.attach()
    model = classifier(dropout=0.0)
    biases = [p for p in model.parameters() if p.dim() == 1]
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (script.ranks,)), ignored_params=set(biases))
    matrices = [p for p in model.parameters() if p.dim() == 2]

    def averaged() -> None:
        for bias in biases:
            dist.all_reduce(bias.grad)
            bias.grad /= script.ranks

    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (matrices, biases)]
    train(script, model, optimizers, batches(script), between=averaged)


def first_version(script: Script, strategy: str = "FULL_SHARD", clip: str = "") -> None:
    """FSDP's first version; perhaps clipped by its own method."""
    net = FullyShardedDataParallel(
        classifier(dropout=0.0), device_id=torch.device("cpu"), use_orig_params=True,
        sharding_strategy=ShardingStrategy[strategy],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    script.attach(net, optimizer)
    train(script, net, [optimizer], batches(script), clip=float(clip or 0), clipped=net.clip_grad_norm_, shards=True)
