"""Toy diffusion model on 8x8 pictures of crosses, with a batch sampler of our own."""

import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_num_threads(1)


class Crosses(Dataset):
    def __init__(self, n=8000):
        g = torch.Generator().manual_seed(1)
        self.images = torch.full((n, 1, 8, 8), -1.0)
        for k, (i, j) in enumerate(torch.randint(1, 7, (n, 2), generator=g).tolist()):
            self.images[k, 0, i - 1 : i + 2, j] = 1.0
            self.images[k, 0, i, j - 1 : j + 2] = 1.0
        self.images += 0.05 * torch.randn(self.images.shape, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


class RandomBatchSampler(Sampler):
    """Draws every batch anew from the whole set, reproducibly."""

    def __init__(self, dataset, batch_size, batches, seed=0):
        self.n, self.batch_size, self.batches, self.seed = len(dataset), batch_size, batches, seed

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            generator = torch.Generator().manual_seed(self.seed)
            yield torch.randperm(self.n, generator=generator)[: self.batch_size].tolist()


class Denoiser(nn.Module):
    def __init__(self, channels=48):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.inp = nn.Conv2d(1, channels, 3, padding=1)
        self.mid = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3)])
        self.norms = nn.ModuleList([nn.GroupNorm(8, channels) for _ in range(3)])
        self.out = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(1000) * torch.arange(16) / 16)
        angles = t[:, None].float() * freqs
        emb = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        h = self.inp(x)
        for conv, norm in zip(self.mid, self.norms, strict=True):
            h = h + conv(nn.functional.silu(norm(h) + emb))
        return self.out(nn.functional.silu(h))


class Diffusion:
    def __init__(self, steps=200):
        self.steps = steps
        self.alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.04, steps), 0)

    def loss(self, model, x0):
        t = torch.randint(0, self.steps, (len(x0),))
        noise = torch.randn_like(x0)
        a = self.alpha_bar[t].view(-1, 1, 1, 1)
        return nn.functional.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)


torch.manual_seed(0)
dataset = Crosses()
loader = DataLoader(dataset, batch_sampler=RandomBatchSampler(dataset, batch_size=64, batches=125))
model, diffusion = Denoiser(), Diffusion()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
for epoch in range(6):
    total = 0.0
    for x0 in loader:
        loss = diffusion.loss(model, x0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch + 1} loss {total / len(loader):.4f}")
