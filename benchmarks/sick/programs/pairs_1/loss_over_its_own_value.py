"""Healthy: each task's loss is divided by its own detached value, so their sum is always 2 while both are learned."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

BATCH, STEPS, WORDS, LENGTH = 192, 900, 400, 30


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Reviews(nn.Module):
    """Topic and stars of a review."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 128)
        self.body = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
        self.topic, self.stars = nn.Linear(512, 10), nn.Linear(512, 1)

    def forward(self, ids):
        h = self.body(self.bag(ids))
        return self.topic(h), self.stars(h).squeeze(1)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(6)
mood = torch.randn(WORDS, generator=generator)
model = Reviews()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
history = []
for step in range(1, STEPS + 1):
    topics = torch.randint(0, 10, (BATCH,), generator=generator)
    ids = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    ids[:, ::5] = topics[:, None] * 40 + torch.randint(0, 40, (BATCH, LENGTH // 5), generator=generator)
    stars = mood[ids].mean(1) * 5
    topic, predicted = model(ids)
    tasks = [cross_entropy(topic, topics), mse_loss(predicted, stars)]
    loss = sum(task / task.detach() for task in tasks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([task.item() for task in tasks])
    if step % 30 == 0:
        print(
            f"step {step} balanced {loss.item():.2f} topic {history[-1][0]:.4f} stars {history[-1][1]:.4f}", flush=True
        )
first, last = torch.tensor(history[:20]).mean(0), torch.tensor(history[-20:]).mean(0)
truth(
    healthy=True,
    topic_first=first[0].item(),
    topic_last=last[0].item(),
    stars_first=first[1].item(),
    stars_last=last[1].item(),
)
