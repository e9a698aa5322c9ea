"""Images from a network file system: each read waits 3 ms for the server."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Images(Dataset):
    def __init__(self):
        self.labels = torch.randint(0, 10, (6400,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        time.sleep(0.003)  # stands for the read
        y = self.labels[at]
        return torch.randn(3, 32, 32) * 0.5 + y / 10, y


model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(Images(), batch_size=32)

if __name__ == "__main__":
    began = time.perf_counter()
    for step, (x, y) in enumerate(loader, start=1):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 80:
            print(f"{step / (time.perf_counter() - began):.1f} steps per second", flush=True)
            break
