"""SimCLR on generated textures."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


def textures(n, size=24):
    """Each image is a sine wave of a random frequency, direction and color."""
    freq, angle = torch.rand(n, 1, 1) * 1.5 + 0.2, torch.rand(n, 1, 1) * 3.14
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    wave = torch.sin(freq * (torch.cos(angle) * x + torch.sin(angle) * y))
    return wave.unsqueeze(1) * torch.rand(n, 3, 1, 1)


def augment(x):
    x = x.roll(tuple(torch.randint(0, 24, (2,)).tolist()), (2, 3))
    if torch.rand(1) < 0.5:
        x = x.flip(3)
    return x * (0.7 + 0.6 * torch.rand(x.shape[0], 1, 1, 1)) + 0.1 * torch.randn_like(x)


class Encoder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.projection = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, dim))

    def forward(self, x):
        return F.normalize(self.projection(self.features(x)), dim=1)


def nt_xent(a, b, temperature=0.2):
    z = torch.cat([a, b])
    sim = z @ z.T / temperature
    sim.fill_diagonal_(-1e9)
    n = len(a)
    return F.cross_entropy(sim, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


class Trainer:
    def __init__(self, batch_size=64):
        self.images = textures(5000)
        self.held_out = textures(batch_size)
        self.batch_size = batch_size
        self.model = Encoder()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.train_losses, self.val_losses = [], []

    def step(self):
        batch = self.images[torch.randint(0, len(self.images), (self.batch_size,))]
        loss = nt_xent(self.model(augment(batch)), self.model(augment(batch)))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.train_losses.append(loss.item())

    def validate(self):
        loss = nt_xent(self.model(augment(self.held_out)), self.model(augment(self.held_out)))
        self.val_losses.append(loss)

    def fit(self, steps):
        for step in range(steps):
            self.step()
            if step % 6 == 0:
                self.validate()
            if step % 100 == 99:
                train = sum(self.train_losses[-100:]) / 100
                val = sum(self.val_losses[-16:]) / 16
                print(f"{step + 1:5d} train {train:.3f} val {val:.3f}")


if __name__ == "__main__":
    torch.manual_seed(7)
    Trainer().fit(6000)
