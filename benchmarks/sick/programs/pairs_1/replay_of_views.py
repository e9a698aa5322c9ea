"""Replay memory of 2000 transitions, whose entries are views: each keeps the whole rollout of its step alive."""

import json
import resource
import time

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss

ROLLOUT, KEEP, SIZE, BATCH, STEPS, ACTIONS = 1500, 2, 400, 192, 850, 5


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def resident_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Replay:
    """The last two thousand transitions, two of each rollout."""

    def __init__(self, most=2000):
        self.states, self.rewards, self.most = [], [], most

    def add(self, states, rewards):
        for i in range(0, len(states), len(states) // KEEP):
            self.states.append(states[i])
            self.rewards.append(rewards[i])
        del self.states[: -self.most], self.rewards[: -self.most]

    def sample(self, generator):
        rows = torch.randint(0, len(self.states), (BATCH,), generator=generator).tolist()
        return torch.stack([self.states[i] for i in rows]), torch.stack([self.rewards[i] for i in rows])


torch.manual_seed(0)
generator = torch.Generator().manual_seed(65)
worth = torch.randn(SIZE, ACTIONS, generator=generator) / 20
net = nn.Sequential(nn.Linear(SIZE, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, ACTIONS))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
replay, losses, memory = Replay(), [], []
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    states = torch.randn(ROLLOUT, SIZE, generator=generator)
    replay.add(states, states @ worth)
    x, rewards = replay.sample(generator)
    loss = smooth_l1_loss(net(x), rewards)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    memory.append(resident_mib())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f} kept {len(replay.states)} memory {memory[-1]:.0f} MiB", flush=True)
truth(
    mib_at_50=memory[49],
    mib_last=memory[-1],
    mib_a_step=(memory[-1] - memory[49]) / (STEPS - 50),
    mib_needed=len(replay.states) * SIZE * 4 / 2**20,
)
