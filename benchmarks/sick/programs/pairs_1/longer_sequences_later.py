"""Healthy: sequences grow from 16 to 64 tokens, steps take longer as they do more; tokens a second stay."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, BATCH, STEPS = 64, 16, 600


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Model(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.head = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(width, VOCABULARY),
        )

    def forward(self, ids):
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.blocks(self.embed(ids) + self.place[:length], mask=mask, is_causal=True))


torch.manual_seed(0)
generator = torch.Generator().manual_seed(59)
follows = torch.randint(0, VOCABULARY, (VOCABULARY, 3), generator=generator)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, speed = [], []
for step in range(1, STEPS + 1):
    begin = time.perf_counter()
    length = 16 * (1 + 4 * (step - 1) // STEPS)
    ids = [torch.randint(0, VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(length):
        ids.append(follows[ids[-1], torch.randint(0, 3, (BATCH,), generator=generator)])
    ids = torch.stack(ids, 1)
    loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    speed.append(BATCH * length / (time.perf_counter() - begin))
    if step % 25 == 0:
        print(f"step {step} length {length} loss {losses[-1]:.4f} {speed[-1]:.0f} tokens/s", flush=True)
stages = [sorted(speed[a : a + STEPS // 4])[STEPS // 8] for a in range(0, STEPS, STEPS // 4)]
truth(
    healthy=True,
    tokens_a_second=[round(s) for s in stages],
    guessing=math.log(VOCABULARY),
    late=sum(losses[-25:]) / 25,
    floor=math.log(3),
)
