"""A rank of DDP on its own fake device: `fake_ddp.py FOLDER [--attach]`. Writes losses, weights and what the rank waited for."""

import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from fake_accelerator import load
from torch import nn

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
fakegpu = load()
torch.accelerator.set_device_index(rank)
device = torch.device("fakegpu", rank)
dist.init_process_group("fakeccl")
run = None
if "--attach" in sys.argv:
    import perfagent

    run = perfagent.attach(record=str(folder / str(rank) / "record"))

torch.manual_seed(5)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
batches = [(torch.randn(8, 6).to(device), torch.randint(0, 3, (8,)).to(device)) for _ in range(4)]
losses = []
fakegpu.forget_counts()
for step in range(20):
    x, y = batches[step % 4]
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
agents = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("perfagent")}
counts = fakegpu.counts(without=agents)
if run is not None:
    run.finish()
told = {
    "losses": [float(loss).hex() for loss in losses],
    "weights": [float(number).hex() for one in model.parameters() for number in one.detach().cpu().flatten()],
    "waits": [counts.scalar_reads, counts.synchronizations, counts.waits],
}
(folder / f"{rank}.json").write_text(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
