"""A small GAN on rings, with everything in TensorBoard."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.tensorboard import SummaryWriter

torch.set_num_threads(1)
torch.manual_seed(0)

latent_dim = 32
img_size = 16
batch_size = 64
n_steps = 300


def real_images(n):
    yy, xx = torch.meshgrid(torch.arange(img_size), torch.arange(img_size), indexing="ij")
    center = torch.rand(n, 2, 1, 1) * 4 + 5.5
    radius = torch.rand(n, 1, 1) * 3 + 2
    distance = ((yy - center[:, 0]) ** 2 + (xx - center[:, 1]) ** 2).sqrt()
    return (2 * torch.exp(-((distance - radius) ** 2)) - 1).unsqueeze(1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(latent_dim, 64 * 4 * 4)
        self.up = nn.Sequential(
            nn.BatchNorm2d(64), nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z):
        return self.up(self.fc(z).view(-1, 64, 4, 4))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2),
        )  # fmt: skip
        self.fc = nn.Linear(64 * 4 * 4, 1)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1)).squeeze(1)


G, D = Generator(), Discriminator()
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
writer = SummaryWriter("runs/rings")
fixed_noise = torch.randn(64, latent_dim)

for step in range(n_steps):
    real = real_images(batch_size)
    fake = G(torch.randn(batch_size, latent_dim))

    d_real, d_fake = D(real), D(fake.detach())
    loss_d = F.softplus(-d_real).mean() + F.softplus(d_fake).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()

    loss_g = F.softplus(-D(fake)).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()

    writer.add_scalar("loss/d", loss_d.item(), step)
    writer.add_scalar("loss/g", loss_g.item(), step)
    for net_name, net in (("G", G), ("D", D)):
        for name, param in net.named_parameters():
            writer.add_histogram(f"{net_name}/{name}", param.detach(), step)
            writer.add_histogram(f"{net_name}/{name}.grad", param.grad, step)
    with torch.no_grad():
        samples = (G(fixed_noise) + 1) / 2
    grid = samples.view(8, 8, img_size, img_size).transpose(1, 2).reshape(1, 8 * img_size, 8 * img_size)
    writer.add_image("samples", F.interpolate(grid.unsqueeze(0), scale_factor=4)[0], step)
    if step % 50 == 0:
        print(f"step {step} d {loss_d.item():.3f} g {loss_g.item():.3f}")

writer.close()
