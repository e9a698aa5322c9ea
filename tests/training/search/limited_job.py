"""find_batch_size in a process whose address space is limited, so that memory really ends; and one with ranks. Prints
JSON."""

from __future__ import annotations

import gc
import json
import resource
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from perfagent.errors import ConfigError
from perfagent.training.search.batch_size import find_batch_size, search_batch_size
from perfagent.training.search.host_memory import _status

torch.set_num_threads(1)
MB = 2**20


def limited() -> None:
    """Each sample keeps 4 MiB of activations; the space left is 120 MiB."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    alive: list[int] = []

    def step(size: int) -> None:
        inputs = torch.randn(size * 1024, 64)  # hidden: 2 MiB a sample, and as much after the ReLU
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        alive.append(size)

    step(1)
    optimizer.state.clear()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    generator = torch.get_rng_state()
    used = _status("VmSize") or 0
    gc.collect()
    resident = _status("VmRSS") or 0
    resource.setrlimit(resource.RLIMIT_AS, (used + 120 * MB, resource.RLIM_INFINITY))
    found, trials = search_batch_size(step, 1, 4096)
    after = _status("VmRSS") or 0
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    objects = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.nbytes > MB]
    print(
        json.dumps(
            {
                "found": found,
                "ran": max(alive),
                "failed": [trial.batch_size for trial in trials if not trial.fits],
                "same": all(
                    torch.equal(one, other) for one, other in zip(before, model.state_dict().values(), strict=True)
                ),
                "generator": bool(torch.equal(generator, torch.get_rng_state())),
                "state": len(optimizer.state),
                "grown_mb": (after - resident) / MB,
                "large_tensors": len(objects),
            }
        )
    )


def ranks() -> None:
    """Rank 1 has room for 5, rank 0 for 11; then a step that communicates."""
    dist.init_process_group("gloo")
    room = (11, 5)[dist.get_rank()]
    model = nn.Linear(4, 4)
    tried: list[int] = []

    def step(size: int) -> None:
        tried.append(size)
        functional.mse_loss(model(torch.ones(size, 4)), torch.ones(size, 4)).backward()
        if size > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    found = find_batch_size(step, limit=32)
    wrapped = nn.parallel.DistributedDataParallel(model)
    refused = ""
    try:
        find_batch_size(lambda size: wrapped(torch.ones(size, 4)).sum().backward(), limit=4)
    except ConfigError as error:
        refused = str(error)
    print(json.dumps({"found": found, "tried": tried, "refused": refused}))
    dist.destroy_process_group()


if __name__ == "__main__":
    {"limited": limited, "ranks": ranks}[sys.argv[1]]()
