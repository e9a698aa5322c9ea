"""The moving average of a 100 MB table is rebuilt after each step: three new buffers are filled and freed each time."""

import json
import resource
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, SIZE, CLASSES, BATCH, LENGTH, STEPS = 200_000, 128, 20, 128, 16, 230


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Average:
    """Exponential moving average of a model, to be tested and shipped in its place."""

    def __init__(self, model, decay=0.99):
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p


torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(309)
table = nn.EmbeddingBag(WORDS, SIZE, sparse=True)
nn.init.normal_(table.weight, std=0.05)
head = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU(), nn.Linear(256, CLASSES))
model = nn.Sequential(table, head)
optimizers = torch.optim.SparseAdam(list(table.parameters()), lr=0.01), torch.optim.Adam(head.parameters(), lr=1e-3)
average, losses, before = Average(model), [], resource.getrusage(resource.RUSAGE_SELF)
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    common = (WORDS * torch.rand(BATCH, LENGTH, generator=generator) ** 3).long()  # some words are used far more
    telling = torch.rand(BATCH, LENGTH, generator=generator) < 0.6  # words of that class, which are each twentieth
    ids = torch.where(telling, common // CLASSES * CLASSES + y[:, None], common)
    loss = cross_entropy(model(ids), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    average.update(model)
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
