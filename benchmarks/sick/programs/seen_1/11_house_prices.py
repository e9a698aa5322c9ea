"""Regression of house prices with a deep ReLU network."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def load_houses(n=20_000, seed=0):
    rng = np.random.default_rng(seed)
    area = rng.gamma(6, 20, n)
    rooms = np.clip(np.round(area / 30 + rng.normal(0, 0.7, n)), 1, 12)
    age = rng.uniform(0, 100, n)
    distance = rng.exponential(8, n)
    other = rng.normal(size=(n, 12))
    price = 2500 * area + 20_000 * rooms - 900 * age - 6000 * distance + 8000 * other[:, 0] + rng.normal(0, 2e4, n)
    features = np.column_stack([area, rooms, age, distance, other]).astype(np.float32)
    features = (features - features.mean(0)) / features.std(0)
    return torch.from_numpy(features), torch.from_numpy(price.astype(np.float32) / 1000)  # thousands


class PriceNet(nn.Module):
    def __init__(self, n_features, width=192, depth=5):
        super().__init__()
        layers = []
        for i in range(depth):
            layers += [nn.Linear(n_features if i == 0 else width, width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


def train_one_epoch(model, loader, optimizer, loss_fn):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
    return total / len(loader.dataset)


def main():
    torch.manual_seed(0)
    x, y = load_houses()
    loader = DataLoader(TensorDataset(x[:16_000], y[:16_000]), batch_size=128, shuffle=True)
    model = PriceNet(x.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss_fn = nn.MSELoss()
    for epoch in range(1, 41):
        loss = train_one_epoch(model, loader, optimizer, loss_fn)
        print(f"epoch {epoch}: rmse {loss**0.5:.1f} thousand")
    model.eval()
    with torch.no_grad():
        predicted = model(x[16_000:])
    print(f"test rmse {((predicted - y[16_000:]) ** 2).mean().sqrt():.1f}; spread of the answers {predicted.std():.3f}")


if __name__ == "__main__":
    main()
