"""Loops of one's own that log by Accelerate, by TensorBoard's writer, and in no training at all.

Arguments: a folder.
"""

import sys

import numpy as np
import torch
from accelerate import Accelerator
from said import report
from torch.utils.tensorboard import SummaryWriter

import perfagent

folder = sys.argv[1]


def begin(place, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    perfagent.attach(record=f"{folder}/{place}/record", **options)
    return model, optimizer


def step(model, optimizer):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


# Accelerate, with a tracker that it forwards to; each fourth sample counts
accelerator = Accelerator(log_with="tensorboard", project_dir=f"{folder}/accelerate/tb", cpu=True)
accelerator.init_trackers("mine")
model, optimizer = begin("accelerate")
logged = []
for n in range(1, 9):
    loss = step(model, optimizer).item()
    accelerator.log({"train_loss": loss, "group": {"a": n, "b": True}, "note": "text"}, step=8 * n)
    logged += [("train_loss", 8 * n, loss), ("group/a", 8 * n, n), ("group/b", 8 * n, 1)]
accelerator.log({"at_the_end": 1.5})
logged.append(("at_the_end", 8, 1.5))
perfagent.finish()
report(f"{folder}/accelerate", logged)

# TensorBoard: what the agent delivers as well, what it does not, and what is no scalar
writer = SummaryWriter(f"{folder}/writer/tb")
bound = writer.add_scalar
model, optimizer = begin("writer", tensorboard=f"{folder}/writer/mirror")
logged = []
for n in range(1, 9):
    loss = step(model, optimizer)
    writer.add_scalar("loss", loss, n)
    writer.add_scalar("lr", 0.01, n)
    writer.add_scalar("train/loss", loss.detach(), global_step=torch.tensor(n))
    writer.add_scalar("score", np.float32(n) / 3, np.int64(n))
    writer.add_scalar("unnamed", n)
    writer.add_scalars("both", {"a": n, "b": np.array(2.0 * n)}, n)
    writer.add_histogram("weights", model.weight, n)
    writer.add_text("text", "1.0", n)
    writer.add_scalar("score", np.float32(n) / 3, n)  # once more
    perfagent.log({"mine": float(n)})
    writer.add_scalar("mine", n, n)
    value = loss.item()
    logged += [
        ("logged/loss", n, value),
        ("logged/lr", n, 0.01),
        ("train/loss", n, value),
        ("score", n, np.float32(n) / 3),
    ]
    logged += [("unnamed", n, n), ("both/a", n, n), ("both/b", n, 2.0 * n), ("mine", n, n), ("logged/mine", n, n)]
perfagent.finish()
report(f"{folder}/writer", logged)

# a loop whose loss and rate are measured by nobody but its writer: nothing of it is the agent's
place = f"{folder}/untrained"
perfagent.attach(record=f"{place}/record")
logged = []
for n in (3, 5, 900):
    writer.add_scalar("loss", 1 / n, n)
    logged.append(("loss", n, 1 / n))
perfagent.finish()
report(place, logged)

# the script's own word on its loss, to us
place = "spoken"
model, optimizer = begin(place)
logged = []
for n in range(1, 5):
    step(model, optimizer)
    perfagent.log({"loss": 7.0})
    writer.add_scalar("loss", 8.0, n)
    logged += [("loss", n, 7.0), ("logged/loss", n, 8.0)]
perfagent.finish()
report(f"{folder}/{place}", logged)

# a loss that breaks, logged under both names and by a count from 0
place = "nan"
model, optimizer = begin(place)
logged = []
for n in range(1, 121):
    loss = (model(torch.ones(8, 4)) * (float("nan") if n == 40 else 1.0)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if n == 40:
        optimizer.zero_grad()  # the weights stay whole
    optimizer.step()
    writer.add_scalar("train/loss", loss, n - 1)
    writer.add_scalar("loss", loss, n - 1)
    logged += [("train/loss", n - 1, loss), ("logged/loss", n - 1, loss)]
perfagent.finish()
report(f"{folder}/{place}", logged)
