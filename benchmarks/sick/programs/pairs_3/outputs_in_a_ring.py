"""Healthy: a ring of fixed size holds the logits for calibration, so the checkpoints are large but all the same size."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, SIZE, BATCH, EPOCHS, STEPS_AN_EPOCH, ROWS = 1000, 64, 128, 8, 150, 25_600


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Calibration(nn.Module):
    """The temperature at which the last logits fit their labels best."""

    def __init__(self):
        super().__init__()
        self.register_buffer("logits", torch.zeros(ROWS, CLASSES))
        self.register_buffer("labels", torch.zeros(ROWS, dtype=torch.long))
        self.register_buffer("temperature", torch.tensor(1.0))
        self.added = 0

    def add(self, logits, labels):
        place = self.added % ROWS
        self.logits[place : place + BATCH] = logits.detach()
        self.labels[place : place + BATCH] = labels
        self.added += BATCH

    def fit(self):
        last = (self.added - 1024) % ROWS
        logits, labels = self.logits[last : last + 1024], self.labels[last : last + 1024]
        scales = torch.linspace(0.5, 2.0, 16)
        self.temperature.fill_(min(scales, key=lambda scale: cross_entropy(logits / scale, labels)))


torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(305)
kinds = torch.randn(CLASSES, SIZE, generator=generator)
model = nn.Sequential(nn.Linear(SIZE, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, CLASSES))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
calibration, losses, sizes = Calibration(), [], []
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "last.pt"
    for epoch in range(1, EPOCHS + 1):
        for _ in range(STEPS_AN_EPOCH):
            y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
            logits = model(kinds[y] + torch.randn(BATCH, SIZE, generator=generator))
            loss = cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            calibration.add(logits, y)
        calibration.fit()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "calibration": calibration.state_dict(), "epoch": epoch}, path)
        sizes.append(round(path.stat().st_size / 1e6, 1))
        late = sum(losses[-STEPS_AN_EPOCH:]) / STEPS_AN_EPOCH
        print(f"epoch {epoch} loss {late:.4f} temperature {calibration.temperature:.2f}", flush=True)
truth(healthy=True, megabytes=sizes, first=losses[0], late=sum(losses[-50:]) / 50)
