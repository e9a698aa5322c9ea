"""Each sample opens the zip of all samples anew, in the training process, and most of the time goes there."""

import io
import json
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

FILES, BATCH, EPOCHS, CLASSES = 1400, 8, 2, 6


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Scans(Dataset):
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return FILES

    def __getitem__(self, i):
        with zipfile.ZipFile(self.path) as archive:
            return torch.from_numpy(np.load(io.BytesIO(archive.read(f"{i:06d}.npy")))), i % CLASSES


def write(path):
    random = np.random.default_rng(51)
    kinds = random.standard_normal((CLASSES, 1024)).astype(np.float32)
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(FILES):
            buffer = io.BytesIO()
            np.save(buffer, kinds[i % CLASSES] + 3 * random.standard_normal(1024).astype(np.float32))
            archive.writestr(f"{i:06d}.npy", buffer.getvalue())


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scans.zip"
        write(path)
        model = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, CLASSES))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loader = DataLoader(Scans(path), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1))
        losses, waited, begin = [], 0.0, time.perf_counter()
        truth(onset=time.time(), step=1)
        last = time.perf_counter()
        step = 0
        for _ in range(EPOCHS):
            for x, y in loader:
                waited += time.perf_counter() - last
                step += 1
                loss = cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if step % 20 == 0:
                    print(f"step {step} loss {losses[-1]:.4f}", flush=True)
                last = time.perf_counter()
    truth(share_waited=waited / (time.perf_counter() - begin), late=sum(losses[-50:]) / 50)


if __name__ == "__main__":
    main()
