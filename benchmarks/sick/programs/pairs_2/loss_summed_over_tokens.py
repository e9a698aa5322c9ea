"""Healthy: the loss is a sum over the tokens of a text: it begins at over two hundred, which is guessing, and falls."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

TOKENS, WIDTH, LENGTH, BATCH, STEPS = 1000, 256, 32, 16, 420


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, mask):
        h = self.first(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -math.inf).triu(1))

        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return self.norm(x) @ self.embed.weight.T


def texts(seed):
    """Each token is followed by one of four."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randint(0, TOKENS, (TOKENS, 4), generator=generator)
    while True:
        tokens = torch.randint(0, TOKENS, (BATCH, 1), generator=generator)
        for _ in range(LENGTH):
            turn = torch.randint(0, 4, (BATCH,), generator=generator)
            tokens = torch.cat([tokens, follows[tokens[:, -1], turn][:, None]], 1)
        yield tokens


torch.manual_seed(0)
model = TiedModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step, tokens in zip(range(1, STEPS + 1), texts(6)):
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / BATCH
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == 1:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
print(
    "TRUTH",
    json.dumps({"healthy": True, "guessing": LENGTH * math.log(TOKENS), "floor": LENGTH * math.log(4)}),
    flush=True,
)
