"""A window of the last 150,000 rows is joined anew in each step: 150 MB are taken, filled and given back."""

import json
import resource
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

ROWS, SIZE, ARRIVE, BATCH, STEPS = 150_000, 256, 64, 512, 400


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Window:
    """The last rows of a stream, from which batches are drawn."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def add(self, x, y):
        self.x = torch.cat([self.x[len(x) :], x])
        self.y = torch.cat([self.y[len(y) :], y])

    def draw(self, count, generator):
        rows = torch.randint(0, len(self.x), (count,), generator=generator)
        return self.x[rows], self.y[rows]


def stream(count, mixing, generator):
    x = torch.randn(count, SIZE, generator=generator)
    return x, (x @ mixing).sin()


torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(310)
mixing = torch.randn(SIZE, 4, generator=generator) / 20
window = Window(*stream(ROWS, mixing, generator))
model = nn.Sequential(nn.Linear(SIZE, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses, before = [], resource.getrusage(resource.RUSAGE_SELF)
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    window.add(*stream(ARRIVE, mixing, generator))
    x, y = window.draw(BATCH, generator)
    loss = mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
after = resource.getrusage(resource.RUSAGE_SELF)
kernel, own = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
truth(
    page_faults_a_step=(after.ru_minflt - before.ru_minflt) / STEPS,
    share_of_kernel=kernel / (kernel + own),
    first=losses[0],
    late=sum(losses[-20:]) / 20,
)
