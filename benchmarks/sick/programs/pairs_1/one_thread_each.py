"""Healthy: one thread for torch and two loader workers with little to do: no core is fought for."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

CLASSES, ROWS, BATCH, SIZE, WIDTH, EPOCHS = 10, 12_800, 128, 128, 448, 9


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(88)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    x = torch.randn(CLASSES, SIZE, generator=generator)[y] + 4 * torch.randn(ROWS, SIZE, generator=generator)
    layers, width = [], SIZE
    for _ in range(5):
        layers += [nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
        width = WIDTH
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    losses = []
    for epoch in range(EPOCHS):
        for xb, yb in loader:
            loss = cross_entropy(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 25 == 0:
                print(f"epoch {epoch} step {len(losses)} loss {losses[-1]:.4f}", flush=True)
    truth(healthy=True, threads=torch.get_num_threads(), guessing=2.303, first=losses[0], late=sum(losses[-100:]) / 100)


if __name__ == "__main__":
    main()
