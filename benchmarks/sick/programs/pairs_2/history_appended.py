"""Healthy: after each step a line is appended to the history of the run, which takes the same time all along."""

import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

COLORS, LENGTH, BATCH, STEPS = 24, 20, 64, 6000


class History:
    def __init__(self, folder):
        self.out = (Path(folder) / "history.jsonl").open("w", buffering=1)

    def add(self, **values):
        self.out.write(json.dumps(values) + "\n")


class Mixer(nn.Module):
    """Finds the color that comes most often in a row of beads."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(COLORS, 48)
        self.along = nn.Sequential(nn.Linear(LENGTH, 64), nn.GELU(), nn.Linear(64, LENGTH))
        self.across = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 48))
        self.out = nn.Linear(48, COLORS)

    def forward(self, beads):
        x = self.embed(beads)
        x = x + self.along(x.transpose(1, 2)).transpose(1, 2)
        return self.out((x + self.across(x)).mean(1))


def rows_of_beads(generator):
    y = torch.randint(0, COLORS, (BATCH,), generator=generator)
    beads = torch.randint(0, COLORS, (BATCH, LENGTH), generator=generator)
    return torch.where(torch.rand(BATCH, LENGTH, generator=generator) < 0.25, y[:, None], beads), y


def train(history):
    torch.manual_seed(0)
    generator, model = torch.Generator().manual_seed(66), Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    begin = time.time()
    for step in range(1, STEPS + 1):
        beads, y = rows_of_beads(generator)
        logits = model(beads)
        loss = cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy = (logits.argmax(1) == y).float().mean().item()
        history.add(
            step=step, loss=loss.item(), accuracy=accuracy, rate=1e-3, seconds=time.time() - begin, rows=step * BATCH
        )
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f} accuracy {accuracy:.2f}", flush=True)
    print("TRUTH", json.dumps({"healthy": True, "loss": loss.item()}), flush=True)


with tempfile.TemporaryDirectory() as folder:
    train(History(folder))
