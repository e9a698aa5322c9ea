"""From step 601 on a progress thread asks for news without a pause: it holds Python's lock, steps take far longer."""

import json
import threading
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, START = 64, 1600, 600


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Progress(threading.Thread):
    """Prints each hundredth step, and looks for it without a pause."""

    def __init__(self, news):
        super().__init__(daemon=True)
        self.news, self.printed = news, 0

    def run(self):
        while True:
            step = self.news["step"]
            if step % 100 == 0 and step != self.printed:
                self.printed = step
                print(f"progress: {step} of {STEPS}", flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(60)
target = torch.randn(24, 6, generator=generator) / 4
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.SiLU()) for _ in range(8)), nn.Linear(24, 6)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
news, losses, seconds = {"step": 0}, [], []
for step in range(1, STEPS + 1):
    begin = time.perf_counter()
    if step == START + 1:
        Progress(news).start()
        truth(onset=time.time(), step=step)
    for _ in range(2):  # two micro-batches
        x = torch.randn(BATCH, 24, generator=generator)
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
    step_before=sorted(seconds[:START])[START // 2],
    step_after=sorted(seconds[START:])[(STEPS - START) // 2],
    late=sum(losses[-20:]) / 20,
)
