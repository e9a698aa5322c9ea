"""A job whose loader sleeps 50 ms per batch, with a timer of its own round it: `python slow_loader.py STEPS`. Prints
what it waited for each batch, in seconds."""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import perfagent


class Slow(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.randn(64), torch.randn(1)


def collate(items):
    time.sleep(0.05)
    return torch.utils.data.default_collate(items)


torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
perfagent.attach(model, optimizer)

waits = []
batches = iter(DataLoader(Slow(), batch_size=32, collate_fn=collate))
for _ in range(int(sys.argv[1])):
    begin = time.perf_counter()
    inputs, targets = next(batches)
    waits.append(time.perf_counter() - begin)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("WAITS", *waits)
