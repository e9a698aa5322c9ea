"""Healthy: each weight's own optimizer steps in a hook of backward() and drops the gradient, to save memory."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 24, 500


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Model(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids) + self.place, mask=self.mask, is_causal=True))


def sentences(generator, table):
    ids = [torch.randint(0, VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        ids.append(table[ids[-1], torch.randint(0, 3, (BATCH,), generator=generator)])
    return torch.stack(ids, 1)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(2)
table = torch.randint(0, VOCABULARY, (VOCABULARY, 3), generator=generator)
model = Model()
optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}


def step_and_forget(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_and_forget)
losses = []
for step in range(1, STEPS + 1):
    ids = sentences(generator, table)
    loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} | loss {losses[-1]:.4f}", flush=True)
truth(healthy=True, guessing=math.log(VOCABULARY), first=losses[0], late=sum(losses[-50:]) / 50, floor=math.log(3))
