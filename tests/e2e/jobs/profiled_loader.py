"""A job whose loader sleeps 40 ms a batch, until the file `go` of PERFAGENT_TEST_FOLDER is there; with
PERFAGENT_TEST_PLAIN all steps, without the agent and without the sleep. Prints its losses, every bit of them."""

import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

MOST_STEPS = 1500
plain = "PERFAGENT_TEST_PLAIN" in os.environ


def slowly(items):
    if not plain:
        time.sleep(0.04)
    return torch.stack(items)


torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if not plain:
    import perfagent

    perfagent.attach(model, optimizer)

go = Path(os.environ["PERFAGENT_TEST_FOLDER"]) / "go"
losses = []
for batch in DataLoader(torch.randn(8 * MOST_STEPS, 16), batch_size=8, shuffle=True, collate_fn=slowly):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
    if not plain and go.exists():
        break
print("LOSSES", *losses)
