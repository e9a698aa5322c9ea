"""Healthy: a signal from outside comes three times and means "save now": the training does, and goes on to its end."""

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import nn

PLACES, ARMS, BATCH, STEPS, SIGNALS = 16, 6, 256, 6000, (1500, 3000, 4500)


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


class SaveOnSignal:
    """The handler only takes a note; the loop saves after its step."""

    def __init__(self, policy, optimizer, file):
        self.parts, self.file, self.wanted, self.saved = (policy, optimizer), file, False, 0
        signal.signal(signal.SIGUSR1, self.note)

    def note(self, number, frame):
        self.wanted = True

    def after_step(self):
        if self.wanted:
            torch.save([part.state_dict() for part in self.parts], self.file)
            self.wanted, self.saved = False, self.saved + 1


torch.manual_seed(0)
shop, policy = Shop(4), Policy()
optimizer = torch.optim.RMSprop(policy.parameters(), lr=3e-4)
saver = SaveOnSignal(policy, optimizer, Path(tempfile.mkdtemp()) / "policy.pt")
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
    saver.after_step()
    if step in SIGNALS:  # what a scheduler does that may want the machine back soon
        subprocess.run(["sh", "-c", f"kill -USR1 {os.getpid()}"], check=True)
print("TRUTH", json.dumps({"healthy": True, "sales": mean_sales, "saved": saver.saved}), flush=True)
