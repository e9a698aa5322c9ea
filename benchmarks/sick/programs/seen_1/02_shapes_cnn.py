"""Classify drawn shapes with a small CNN and "strong" augmentation."""

import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
SIZE = 32


def draw(kind, cx, cy, r):
    img = torch.zeros(3, SIZE, SIZE)
    for i in range(SIZE):
        for j in range(SIZE):
            dx, dy = i - cx, j - cy
            inside = (
                dx * dx + dy * dy < r * r if kind == 0
                else max(abs(dx), abs(dy)) < r if kind == 1
                else abs(dx) + abs(dy) < r if kind == 2
                else abs(dx) < r / 3 or abs(dy) < r / 3
            )  # fmt: skip
            if inside:
                img[:, i, j] = 1.0
    return img


class AddGaussianNoise:
    def __init__(self, sigma):
        self.sigma = sigma

    def __call__(self, img):
        pixels = img.flatten().tolist()
        return torch.tensor([p + random.gauss(0, self.sigma) for p in pixels]).view_as(img)


class RandomRotate:
    def __call__(self, img):
        a = random.uniform(-0.5, 0.5)
        ca, sa, c = math.cos(a), math.sin(a), SIZE / 2
        src = img.tolist()
        out = [[[0.0] * SIZE for _ in range(SIZE)] for _ in range(3)]
        for y in range(SIZE):
            for x in range(SIZE):
                sx, sy = int(ca * (x - c) - sa * (y - c) + c), int(sa * (x - c) + ca * (y - c) + c)
                if 0 <= sx < SIZE and 0 <= sy < SIZE:
                    for ch in range(3):
                        out[ch][y][x] = src[ch][sy][sx]
        return torch.tensor(out)


class Shapes(Dataset):
    def __init__(self, n, transforms):
        rnd = random.Random(0)
        self.items = []
        for _ in range(n):
            kind = rnd.randrange(4)
            self.items.append((draw(kind, rnd.randint(10, 22), rnd.randint(10, 22), rnd.randint(5, 9)), kind))
        self.transforms = transforms

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        img, label = self.items[i]
        for t in self.transforms:
            img = t(img)
        return img, label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 8 * 8, 64)
        self.fc2 = nn.Linear(64, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


if __name__ == "__main__":
    loader = DataLoader(Shapes(1024, [RandomRotate(), AddGaussianNoise(0.2)]), batch_size=32, shuffle=True)
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(5):
        correct = seen = 0
        for x, y in loader:
            opt.zero_grad()
            logits = net(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            opt.step()
            correct += (logits.argmax(1) == y).sum().item()
            seen += len(y)
        print(f"epoch {epoch}: loss {loss.item():.3f} train acc {correct / seen:.3f}")
