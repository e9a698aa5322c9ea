"""A probe registers its forward hooks anew in each step and removes none: each keeps what it saw."""

import json
import resource
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, WIDTH, CLASSES = 96, 380, 512, 10


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Probe:
    """Watches how large activations are."""

    def __init__(self, model):
        self.model = model

    def watch(self):
        for module in self.model:
            if isinstance(module, nn.Linear):
                self.attach(module)

    def attach(self, module):
        seen = []

        def keep(module, inputs, output):
            if not seen:
                seen.append(output.detach().clone().repeat(4, 1))

        module.register_forward_hook(keep)


def resident_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


torch.manual_seed(0)
generator = torch.Generator().manual_seed(63)
prototypes = torch.randn(CLASSES, 128, generator=generator)
model = nn.Sequential(
    nn.Linear(128, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
    nn.Linear(WIDTH, CLASSES),
)  # fmt: skip
probe, losses, memory = Probe(model), [], []
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    probe.watch()
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    for _ in range(4):
        loss = cross_entropy(model(prototypes[y] + 2 * torch.randn(BATCH, 128, generator=generator)), y)
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    losses.append(loss.item())
    memory.append(resident_mib())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f} memory {memory[-1]:.0f} MiB", flush=True)
truth(
    mib_at_20=memory[19],
    mib_last=memory[-1],
    mib_a_step=(memory[-1] - memory[99]) / (STEPS - 100),
    hooks=sum(len(m._forward_hooks) for m in model),
)
