"""More than one model, more than one optimizer."""

from __future__ import annotations

import torch
from models import WIDTH, Points, classifier
from script import Script, norm_of, train
from torch import nn
from torch.utils.data import DataLoader


def several_optimizers(script: Script) -> None:
    """One loss, one optimizer for the body and a small one for the head: a step is one of the larger."""
    script.attach()
    model = classifier()
    body, head = list(model[:-1].parameters()), list(model[-1].parameters())
    optimizers = [torch.optim.AdamW(body, lr=1e-2), torch.optim.SGD(head, lr=1e-1)]
    train(script, model, optimizers)


def muon(script: Script) -> None:
    """Muon for the matrices, AdamW for the rest, as language models are trained; all clipped together."""
    script.attach()
    model = classifier()
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is large] for large in (True, False))
    optimizers = [torch.optim.AdamW(rest, lr=1e-2), torch.optim.Muon(matrices, lr=1e-3)]
    train(script, model, optimizers, clip=0.5, lr=1e-3)


def several_models(script: Script) -> None:
    """An encoder and a head as two modules, one optimizer for both."""
    script.attach()
    encoder, head = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU()), nn.Linear(24, 4)
    parameters = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.RMSprop(parameters, lr=1e-3)
    for x, y in DataLoader(Points(48), batch_size=8):
        loss = nn.functional.cross_entropy(head(encoder(x)), y)
        optimizer.zero_grad()
        loss.backward()
        norm = norm_of(parameters)
        optimizer.step()
        script.step(loss=loss.item(), lr=1e-3, norm=norm, samples=8)
    script.produced(encoder, head)


def adversarial(script: Script) -> None:
    """A GAN: the discriminator steps first, then the generator, which is larger and whose steps count."""
    script.attach()
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, WIDTH))
    discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    make = torch.optim.Adam(generator.parameters(), lr=2e-3)
    judge = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    for real, _ in DataLoader(Points(48), batch_size=8):
        fake = generator(torch.randn(8, 8))
        judge.zero_grad()
        real_loss = criterion(discriminator(real), torch.ones(8, 1))
        fake_loss = criterion(discriminator(fake.detach()), torch.zeros(8, 1))
        (real_loss + fake_loss).backward()
        judge.step()
        make.zero_grad()
        loss = criterion(discriminator(fake), torch.ones(8, 1))
        loss.backward()
        norm = norm_of(generator.parameters())
        make.step()
        script.step(loss=loss.item(), lr=2e-3, norm=norm, samples=8)
    script.produced(generator, discriminator)
