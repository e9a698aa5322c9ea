"""Pyro: stochastic variational inference of an autoencoder, with the loss that svi.step() returns."""

import pyro
import torch
import truth
from pyro.distributions import Normal
from pyro.infer import SVI, Trace_ELBO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
            pyro.sample("x", Normal(self.decoder(z), 0.5).to_event(1), obs=x)

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            mean, scale = self.encoder(x).split(2, dim=1)
            pyro.sample("z", Normal(mean, scale.exp()).to_event(1))


truth.seed()
pyro.set_rng_seed(3)
model = Autoencoder()
inference = SVI(model.model, model.guide, pyro.optim.ClippedAdam({"lr": 1e-2, "clip_norm": 10.0}), Trace_ELBO())
for _ in range(4):
    for (x,) in DataLoader(TensorDataset(torch.randn(80, 4)), 20, shuffle=True):
        loss = inference.step(x)
        truth.step(1e-2, loss=loss, samples=len(x))
truth.end(model)
