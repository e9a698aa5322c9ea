"""`python meeting.py SIZE ADDRESS`: a rank that trains four steps, run under some launcher or its environment. Its place is
in MEETING_RANK, which perfagent does not read, or in RANK. ADDRESS is where the ranks meet (tcp://host:port, env://).
With `late` behind it, it attaches once they have met."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

import perfagent

rank = int(os.environ.get("MEETING_RANK") or os.environ["RANK"])
size, address, *late = (
    word for word in sys.argv[1:] if not word.startswith("--local_rank=")
)  # of deepspeed's launcher
torch.set_num_threads(1)
if not late:
    run = perfagent.attach(name="met")
dist.init_process_group("gloo", init_method=address, rank=rank, world_size=int(size))
if late:
    run = perfagent.attach(name="met")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
end = time.monotonic() + 60
# a job that lasts: ranks of other nodes learn of it within seconds
while not run._identity.known and time.monotonic() < end:
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
sys.modules["perfagent.lifecycle"].EXIT_S = 60.0  # type: ignore[attr-defined]  # the end waits until all is written
