"""A tiny GPT on the text of the standard library, with linear warm-up and decay."""

import inspect
import json
import math
import statistics
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    block_size: int = 48
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 96
    batch_size: int = 24
    epochs: int = 6
    lr: float = 1e-3
    warmup: int = 20


class Text(Dataset):
    def __init__(self, text, block_size):
        self.chars = sorted(set(text))
        lookup = {c: i for i, c in enumerate(self.chars)}
        self.ids = torch.tensor([lookup[c] for c in text])
        self.block_size = block_size

    def __len__(self):
        return (len(self.ids) - 1) // self.block_size

    def __getitem__(self, i):
        start = i * self.block_size
        return self.ids[start : start + self.block_size], self.ids[start + 1 : start + self.block_size + 1]


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.qkv, self.proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)
        self.mlp = nn.Sequential(nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(), nn.Linear(4 * c.n_embd, c.n_embd))
        self.n_head = c.n_head

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, c, vocab):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, c.n_embd), nn.Embedding(c.block_size, c.n_embd)
        self.blocks = nn.Sequential(*[Block(c) for _ in range(c.n_layer)])
        self.ln, self.head = nn.LayerNorm(c.n_embd), nn.Linear(c.n_embd, vocab, bias=False)
        self.apply(self._init)

    @staticmethod
    def _init(m):
        if isinstance(m, nn.Linear | nn.Embedding):
            nn.init.normal_(m.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        logits = self.head(self.ln(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.set_num_threads(1)
torch.manual_seed(0)
config = Config()
text = "".join(inspect.getsource(m) for m in (statistics, json))
dataset = Text(text, config.block_size)
loader = DataLoader(dataset, batch_size=config.batch_size, shuffle=True, drop_last=True)
model = GPT(config, len(dataset.chars))
optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95))
total_steps = len(loader)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda s: (s + 1) / config.warmup if s < config.warmup
    else max(0.0, (total_steps - s) / (total_steps - config.warmup)),
)  # fmt: skip
for epoch in range(config.epochs):
    losses = []
    for x, y in loader:
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    mean = sum(losses) / len(losses)
    print(f"epoch {epoch} loss {mean:.3f} perplexity {math.exp(mean):.1f}")
