"""After step 3500 a watchdog outside kills the training with signal 9: no last word, no traceback."""

import json
import os
import subprocess
import time

import torch
from torch import nn

PLACES, ARMS, BATCH, STEPS, KILLED_AFTER = 16, 6, 256, 12000, 3500


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(PLACES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.actor, self.critic = nn.Linear(256, ARMS), nn.Linear(256, 1)

    def forward(self, seen):
        h = self.trunk(seen)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h)[:, 0]


class Shop:
    """Which of six offers a visitor takes depends on who the visitor is; a sale pays 1."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.taste = torch.randn(PLACES, ARMS, generator=self.generator)

    def visitors(self):
        return torch.randn(BATCH, PLACES, generator=self.generator)

    def sales(self, visitors, offers):
        chance = torch.sigmoid((visitors @ self.taste).gather(1, offers[:, None])[:, 0] - 1)
        return torch.bernoulli(chance, generator=self.generator)


torch.manual_seed(0)
shop, policy = Shop(4), Policy()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=3e-4)
mean_sales = 0.0
for step in range(1, STEPS + 1):
    visitors = shop.visitors()
    choice, value = policy(visitors)
    offers = choice.sample()
    sales = shop.sales(visitors, offers)
    advantage = sales - value
    loss = -(choice.log_prob(offers) * advantage.detach()).mean()
    loss = loss + 0.5 * advantage.square().mean() - 0.01 * choice.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean_sales += 0.02 * (sales.mean().item() - mean_sales)
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f} sales {mean_sales:.3f}", flush=True)
    if step == KILLED_AFTER:  # what a supervisor does that finds the machine too full
        print("TRUTH", json.dumps({"onset": time.time() + 1, "step": step}), flush=True)
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {os.getpid()}"])
