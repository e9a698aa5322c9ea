"""Healthy: the metrics of each step go to a slow dashboard, from a thread that sends what has gathered."""

import json
import math
import queue
import threading
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, LENGTH, BATCH, STEPS = 90, 24, 64, 1000


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Dashboard(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.points, self.sent = queue.SimpleQueue(), 0

    def run(self):
        while True:
            batch = [self.points.get()]
            while not self.points.empty():
                batch.append(self.points.get())
            time.sleep(0.3)  # the far side takes its time
            self.sent += len(batch)


class Model(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.LSTM(width, width, batch_first=True),
            nn.Linear(width, VOCABULARY),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


torch.manual_seed(0)
generator = torch.Generator().manual_seed(57)
follows = torch.randint(0, VOCABULARY, (VOCABULARY, 2), generator=generator)
model, dashboard = Model(), Dashboard()
dashboard.start()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses, pushing, begin = [], 0.0, time.perf_counter()
for step in range(1, STEPS + 1):
    ids = [torch.randint(0, VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        ids.append(follows[ids[-1], torch.randint(0, 2, (BATCH,), generator=generator)])
    ids = torch.stack(ids, 1)
    loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    start = time.perf_counter()
    dashboard.points.put((step, losses[-1]))
    pushing += time.perf_counter() - start
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} sent {dashboard.sent}", flush=True)
truth(
    healthy=True,
    share_pushing=pushing / (time.perf_counter() - begin),
    guessing=math.log(VOCABULARY),
    late=sum(losses[-25:]) / 25,
    floor=math.log(2),
)
