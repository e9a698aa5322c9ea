"""Transfer learning: freeze a backbone, and train a new head for five classes."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
prototypes = torch.randn(5, 3, 16, 16)


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        )
        self.fc = nn.Linear(32 * 8 * 8, classes)

    def forward(self, x):
        return self.fc(self.backbone(x).flatten(1))


model = Net(classes=100)
model.backbone.requires_grad_(False)
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)
model.fc = nn.Linear(model.fc.in_features, 5)
criterion = nn.CrossEntropyLoss()

for step in range(1, 301):
    y = torch.randint(0, 5, (64,))
    x = 0.5 * prototypes[y] + torch.randn(64, 3, 16, 16)
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
