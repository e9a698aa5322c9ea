"""CNN on noisy digits-like images, tuned for the 32-core workstation of a colleague."""

import os

os.environ["OMP_NUM_THREADS"] = "16"
os.environ["MKL_NUM_THREADS"] = "16"

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Strokes(Dataset):
    """Ten prototypes, shifted and with noise."""

    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        self.prototypes = (torch.rand(10, 1, 28, 28, generator=g) > 0.8).float()
        self.prototypes = nn.functional.avg_pool2d(self.prototypes, 3, 1, 1) * 3
        self.labels = torch.randint(0, 10, (n,), generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        label = int(self.labels[i])
        shift = torch.randint(-3, 4, (2,)).tolist()
        return self.prototypes[label].roll(shift, (1, 2)) + 0.4 * torch.randn(1, 28, 28), label


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(32 * 49, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def main():
    torch.set_num_threads(16)
    torch.manual_seed(0)
    loader = DataLoader(Strokes(12_800), batch_size=64, shuffle=True, num_workers=4, persistent_workers=True)
    model = ConvNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    for epoch in range(4):
        model.train()
        for i, (images, labels) in enumerate(loader):
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 50 == 0:
                print(f"Epoch [{epoch + 1}/4], Step [{i}/{len(loader)}], Loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
