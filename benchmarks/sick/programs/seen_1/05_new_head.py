"""Transfer learning: take a pretrained backbone, freeze it, train a new head for five classes."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class SmallResNet(nn.Module):
    def __init__(self, num_classes=100, width=24):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.block1 = self._block(width)
        self.pool = nn.MaxPool2d(2)
        self.block2 = self._block(width)
        self.fc = nn.Linear(width * 16, num_classes)

    @staticmethod
    def _block(width):
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        x = self.stem(x)
        x = torch.relu(x + self.block1(x))
        x = self.pool(x)
        x = torch.relu(x + self.block2(x))
        x = nn.functional.adaptive_avg_pool2d(x, 4)
        return self.fc(x.flatten(1))


def get_data(n=4000):
    g = torch.Generator().manual_seed(0)
    prototypes = torch.randn(5, 3, 16, 16, generator=g)
    labels = torch.randint(0, 5, (n,), generator=g)
    images = 0.5 * prototypes[labels] + torch.randn(n, 3, 16, 16, generator=g)
    return TensorDataset(images[:-800], labels[:-800]), TensorDataset(images[-800:], labels[-800:])


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = SmallResNet()  # with pretrained weights in the original
    for param in model.parameters():
        param.requires_grad = False
    for param in model.fc.parameters():
        param.requires_grad = True
    optimizer = optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.3)

    model.fc = nn.Linear(model.fc.in_features, 5)
    model = model.to(device)
    criterion = nn.CrossEntropyLoss()

    train_set, val_set = get_data()
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=200)

    for epoch in range(14):
        model.train()
        running_loss = 0.0
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * inputs.size(0)
        scheduler.step()

        if epoch % 4 == 3:
            model.eval()
            with torch.no_grad():
                hits = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in val_loader)
            print(f"epoch {epoch + 1} loss {running_loss / len(train_set):.4f} val acc {hits / len(val_set):.3f}")


if __name__ == "__main__":
    main()
