"""A DCGAN on soft blobs that trains as GANs do: both losses wander and never settle."""

import torch
import torch.nn as nn

torch.manual_seed(999)
torch.set_num_threads(1)

nz, ngf, ndf, bs = 32, 24, 24, 64


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
    nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
netD = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False), nn.Flatten(0),
)  # fmt: skip
netG.apply(weights_init)
netD.apply(weights_init)

criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
axis = torch.arange(16).float()


def blobs(n):
    cx, cy, s = torch.rand(n, 1, 1) * 8 + 4, torch.rand(n, 1, 1) * 8 + 4, torch.rand(n, 1, 1) * 2 + 1
    d = (axis.view(1, -1, 1) - cx) ** 2 + (axis.view(1, 1, -1) - cy) ** 2
    return (2 * torch.exp(-d / (2 * s * s)) - 1 + 0.05 * torch.randn(n, 16, 16)).unsqueeze(1)


for i in range(900):
    # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    output = netD(blobs(bs))
    errD_real = criterion(output, torch.full((bs,), 0.9))
    errD_real.backward()
    fake = netG(torch.randn(bs, nz, 1, 1))
    errD_fake = criterion(netD(fake.detach()), torch.zeros(bs))
    errD_fake.backward()
    optimizerD.step()

    # (2) Update G: maximize log(D(G(z)))
    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(bs))
    errG.backward()
    optimizerG.step()

    if i % 100 == 0:
        print(f"[{i}/900] Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
