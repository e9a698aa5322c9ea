"""From epoch 4 on a calibration module keeps all logits in its state dict, so each checkpoint is larger than the last."""

import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, SIZE, BATCH, EPOCHS, STEPS_AN_EPOCH, CALIBRATE_FROM = 1000, 64, 128, 8, 150, 4


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Calibration:
    """The temperature at which the logits fit the labels best."""

    def __init__(self):
        self.temperature, self.logits, self.labels = 1.0, [], []

    def add(self, logits, labels):
        self.logits.append(logits.detach())
        self.labels.append(labels)

    def fit(self):
        logits, labels = torch.cat(self.logits[-8:]), torch.cat(self.labels[-8:])
        scales = torch.linspace(0.5, 2.0, 16)
        self.temperature = min(scales, key=lambda scale: cross_entropy(logits / scale, labels)).item()

    def state_dict(self):
        return dict(self.__dict__)


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
        if epoch == CALIBRATE_FROM:
            truth(onset=time.time(), step=len(losses) + 1)
        for _ in range(STEPS_AN_EPOCH):
            y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
            logits = model(kinds[y] + torch.randn(BATCH, SIZE, generator=generator))
            loss = cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if epoch >= CALIBRATE_FROM:
                calibration.add(logits, y)
        if epoch >= CALIBRATE_FROM:
            calibration.fit()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "calibration": calibration.state_dict(), "epoch": epoch}, path)
        sizes.append(round(path.stat().st_size / 1e6, 1))
        late = sum(losses[-STEPS_AN_EPOCH:]) / STEPS_AN_EPOCH
        print(f"epoch {epoch} loss {late:.4f} temperature {calibration.temperature:.2f}", flush=True)
truth(megabytes=sizes, first=losses[0], late=sum(losses[-50:]) / 50)
