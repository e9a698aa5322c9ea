"""A GPT with the vocabulary of GPT-2, whose logits are most of its memory; the next batch is made between model and
backward.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import json
import time

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, BATCH, LENGTH = 50_257, 64, 4, 64
torch.manual_seed(3)
torch.set_num_threads(1)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), diagonal=1))

    def forward(self, tokens, targets):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask)
        logits = self.head(hidden)
        return logits, functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


text = torch.randint(0, VOCABULARY, (100_000,))


def get_batch():
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,)).tolist()
    return tuple(torch.stack([text[at + shift : at + shift + LENGTH] for at in starts]) for shift in (0, 1))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
timers = []
tokens, targets = get_batch()
for step in range(1, 25):
    begin = time.perf_counter()
    logits, loss = model(tokens, targets)
    forward = time.perf_counter()
    tokens, targets = get_batch()
    fetched = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step}: loss {loss.item()!r}")
    timers.append({"forward": forward - begin, "backward": backward - fetched, "optimizer": end - backward})
print("TIMERS", json.dumps(timers))
