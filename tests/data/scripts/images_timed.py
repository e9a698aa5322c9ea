"""A small convolutional network on images of several MiB a batch: a worker makes them, and the loop gives their memory
back.

Has timers of its own, read in the head of the loop as in the ImageNet example of torch; prints seconds per phase and
step.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--workers", type=int, default=1)
args = parser.parse_args()

torch.manual_seed(3)
torch.set_num_threads(1)


class Images(Dataset):
    def __init__(self, length, classes=5):
        self.length, self.classes = length, classes

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        image = torch.full((3, 160, 160), float(index % self.classes))
        return image, index % self.classes


if __name__ == "__main__":
    loader = DataLoader(Images(args.steps * 16), batch_size=16, shuffle=True, num_workers=args.workers)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 7, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64, 5)
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    timers = []
    end = time.perf_counter()
    for i, (images, target) in enumerate(loader, start=1):
        loaded = time.perf_counter()
        images, target = images.to("cpu", non_blocking=True), target.to("cpu", non_blocking=True)
        called = time.perf_counter()
        output = model(images)
        loss = criterion(output, target)
        forward = time.perf_counter()
        optimizer.zero_grad()
        cleared = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter()
        print(f"step {i}: loss {loss.item()!r}")
        timers.append(
            {
                "data": loaded - end,
                "forward": forward - called,
                "backward": backward - cleared,
                "optimizer": stepped - backward,
            }
        )
        end = time.perf_counter()
    print("TIMERS", json.dumps(timers))
