"""Trains a small character-level GPT on its own source, as a single-file trainer does: own batching, own loop, no
DataLoader. Prints its own timers at the end: seconds per phase and step as a line of JSON."""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--iters", type=int, default=30)
parser.add_argument("--eval-every", type=int, default=10)
parser.add_argument("--grad-accum", type=int, default=1)
args = parser.parse_args()

batch_size, block_size, n_layer, n_head, n_embd = 12, 64, 2, 4, 64
torch.manual_seed(1337)

text = Path(__file__).read_text(encoding="utf-8")
chars = sorted(set(text))
stoi = {ch: i for i, ch in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text], dtype=torch.long)


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    time.sleep(0.002)  # stands for a memory-mapped file that is not in the page cache
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(0.1)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            z.view(b, t, n_head, c // n_head).transpose(1, 2) for z in self.qkv(self.ln_1(x)).split(n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, len(chars), bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))
        return logits, loss


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


def get_lr(it):
    return 1e-3 * (it + 1) / 5 if it < 5 else 1e-4 + 0.5 * (1 + math.cos(math.pi * it / args.iters)) * 9e-4


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
timers = []
X, Y = get_batch()
for iter_num in range(args.iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num and iter_num % args.eval_every == 0:
        print(f"step {iter_num}: val loss {estimate_loss(model):.4f}")
    spent = {"forward": 0.0, "backward": 0.0, "batching": 0.0, "optimizer": 0.0}
    for _ in range(args.grad_accum):
        t0 = time.perf_counter()
        logits, loss = model(X, Y)
        t1 = time.perf_counter()
        loss = loss / args.grad_accum
        t2 = time.perf_counter()
        X, Y = get_batch()  # the next batch, while an accelerator would still be busy with this one
        t3 = time.perf_counter()
        loss.backward()
        t4 = time.perf_counter()
        spent["forward"] += t1 - t0
        spent["batching"] += t3 - t2
        spent["backward"] += t4 - t3
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    t5 = time.perf_counter()
    optimizer.step()
    spent["optimizer"] += time.perf_counter() - t5
    timers.append(spent)
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item() * args.grad_accum!r}")
print("TIMERS", json.dumps(timers))
