"""A small residual conv net on images that a slow disk delivers, with a validation pass through a loader of its own.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()

torch.manual_seed(5)
torch.set_num_threads(1)


class Pictures(Dataset):
    def __init__(self, count, wait):
        self.count, self.wait = count, wait

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.wait)  # reading and decoding
        label = index % 10
        return torch.randn(3, 32, 32) + 0.2 * label, label


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


net = nn.Sequential(
    nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), Block(24), nn.MaxPool2d(2), Block(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(24, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
train_loader = DataLoader(Pictures(12 * args.batch_size, 0.002), batch_size=args.batch_size, shuffle=True)
valid_loader = DataLoader(Pictures(2 * args.batch_size, 0.0), batch_size=args.batch_size)
steps, timers = 0, []
for _epoch in range(args.epochs):
    net.train()
    t0 = time.perf_counter()
    for images, labels in train_loader:
        t1 = time.perf_counter()
        optimizer.zero_grad()
        t2 = time.perf_counter()
        output = net(images)
        loss = F.cross_entropy(output, labels)
        t3 = time.perf_counter()
        loss.backward()
        t4 = time.perf_counter()
        optimizer.step()
        t5 = time.perf_counter()
        timers.append({"data": t1 - t0, "forward": t3 - t2, "backward": t4 - t3, "optimizer": t5 - t4})
        steps += 1
        print(f"step {steps}: loss {loss.item()!r}")
        t0 = time.perf_counter()
    net.eval()
    with torch.no_grad():
        right = sum((net(images).argmax(1) == labels).sum().item() for images, labels in valid_loader)
    print(f"right: {right}")
print("TIMERS", json.dumps(timers))
