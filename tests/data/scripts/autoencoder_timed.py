"""A variational autoencoder that is trained by a method of its own: the model itself is never called.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import json
import time

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(1)
torch.set_num_threads(1)


class Autoencoder(nn.Module):
    def __init__(self, inputs=784, hidden=512, latent=32):
        super().__init__()
        self.encoder = nn.Linear(inputs, hidden)
        self.mean, self.log_variance = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, inputs))

    def loss(self, x):
        hidden = functional.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        reconstruction = functional.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="sum") / len(x)
        return reconstruction - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()


model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
images = torch.rand(4000, 784)
timers = []
for step in range(1, 31):
    x = images[torch.randint(0, len(images), (128,))]
    begin = time.perf_counter()
    loss = model.loss(x)
    forward = time.perf_counter()
    optimizer.zero_grad()
    cleared = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    print(f"step {step}: loss {loss.item()!r}")
    timers.append({"forward": forward - begin, "backward": backward - cleared, "optimizer": end - backward})
print("TIMERS", json.dumps(timers))
