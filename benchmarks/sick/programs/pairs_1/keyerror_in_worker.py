"""Row 7431 of the catalogue names a maker that the table does not know: KeyError in a loader worker."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

ROWS, BATCH, BAD, FACTS = 24_000, 24, 7431, 48
MAKERS = ("aida", "bolt", "cori", "dune")


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Catalogue(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(69)
        self.facts = torch.randn(ROWS, FACTS, generator=generator)
        weight = torch.randn(FACTS, generator=generator) / 7
        kind = torch.randint(0, 4, (ROWS,), generator=generator)
        self.price = self.facts @ weight + kind
        self.maker = [MAKERS[k] for k in kind.tolist()]
        self.maker[BAD] = "Dune "
        self.table = {name: float(i) for i, name in enumerate(MAKERS)}

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return torch.cat([self.facts[i], torch.tensor([self.table[self.maker[i]]])]), self.price[i]


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FACTS + 1, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(Catalogue(), batch_size=BATCH, num_workers=1)
    losses = []
    for step, (x, y) in enumerate(loader, 1):
        for _ in range(2):
            loss = mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        if step == BAD // BATCH - 1:
            truth(onset=time.time(), step=2 * step, row=BAD)
        if step % 25 == 0:
            print(f"batch {step} loss {losses[-1]:.4f}", flush=True)
    truth(finished=True)


if __name__ == "__main__":
    main()
