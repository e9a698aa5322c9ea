"""Healthy: four threads start at step 601 and wait on an event nearly all the time: no step is slower."""

import json
import threading
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, START = 256, 1500, 600


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Progress(threading.Thread):
    """Prints each hundredth step, and looks for it four times a second."""

    def __init__(self, news):
        super().__init__(daemon=True)
        self.news, self.printed, self.done = news, 0, threading.Event()

    def run(self):
        while not self.done.wait(0.25):
            step = self.news["step"]
            if step - self.printed >= 100:
                self.printed = step
                print(f"progress: {step} of {STEPS}", flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(60)
target = torch.randn(96, 6, generator=generator) / 9
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.SiLU()) for _ in range(6)), nn.Linear(96, 6)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
news, losses, seconds = {"step": 0}, [], []
for step in range(1, STEPS + 1):
    begin = time.perf_counter()
    if step == START + 1:
        for _ in range(4):
            Progress(news).start()
    for _ in range(2):  # two micro-batches
        x = torch.randn(BATCH, 96, generator=generator)
        loss = mse_loss(model(x), (x @ target).tanh()) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(2 * loss.item())
    news["step"] = step
    seconds.append(time.perf_counter() - begin)
    if step % 50 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(
    healthy=True,
    first=losses[0],
    step_before=sorted(seconds[:START])[START // 2],
    step_after=sorted(seconds[START:])[(STEPS - START) // 2],
    late=sum(losses[-20:]) / 20,
)
