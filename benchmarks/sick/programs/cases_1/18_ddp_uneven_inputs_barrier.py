import os; os.environ["VARIANT"] = "barrier"
import os, sys, time, datetime, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset
variant = os.environ.get("VARIANT", "exit")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=200))
rank = dist.get_rank(); torch.manual_seed(rank); torch.set_num_threads(1)
class Shard(IterableDataset):
    def __iter__(self):
        for _ in range(16 * (100 if rank == 0 else 60)):
            x = torch.randn(32); yield x, x[:2].sum().unsqueeze(0)
model = DDP(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
opt = torch.optim.AdamW(model.parameters(), 1e-3)
step = 0
for x, y in DataLoader(Shard(), batch_size=16):
    loss = F.mse_loss(model(x), y); opt.zero_grad(); loss.backward(); opt.step(); step += 1
    time.sleep(0.05)
print(f"rank {rank} did {step} steps", flush=True)
if variant == "barrier": dist.barrier()
dist.destroy_process_group()
