"""A generative adversarial network: two models, two optimizers, two losses a step. Steps are those of the generator.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end; both models' parts are added up.
"""

import json
import time

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(6)
torch.set_num_threads(1)
generator = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 784), nn.Tanh()
)
discriminator = nn.Sequential(
    nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)
)
generators = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
discriminators = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
images = torch.rand(2000, 784) * 2 - 1
real, fake = torch.ones(64, 1), torch.zeros(64, 1)
judge = functional.binary_cross_entropy_with_logits
timers = []
for step in range(1, 31):
    x, z = images[torch.randint(0, len(images), (64,))], torch.randn(64, 64)
    begin = time.perf_counter()
    of_real = judge(discriminator(x), real)
    loss = of_real + judge(discriminator(generator(z).detach()), fake)
    forward = time.perf_counter() - begin
    discriminators.zero_grad()
    begin = time.perf_counter()
    loss.backward()
    backward = time.perf_counter() - begin
    begin = time.perf_counter()
    discriminators.step()
    stepping = time.perf_counter() - begin
    generators.zero_grad()
    begin = time.perf_counter()
    loss = judge(discriminator(generator(z)), real)
    forward += time.perf_counter() - begin
    begin = time.perf_counter()
    loss.backward()
    backward += time.perf_counter() - begin
    begin = time.perf_counter()
    generators.step()
    stepping += time.perf_counter() - begin
    print(f"step {step}: loss {loss.item()!r}")
    timers.append({"forward": forward, "backward": backward, "optimizer": stepping})
print("TIMERS", json.dumps(timers))
