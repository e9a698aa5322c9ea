"""Healthy: half a minute goes by before the first step, in which the words are counted and numbered; then it trains."""

import json
import random
import time
from collections import Counter

import torch
from torch import nn
from torch.nn.functional import cross_entropy

SENTENCES, MERGES, LENGTH, STEPS = 40000, 22, 24, 400


def sentences(seed):
    chance = random.Random(seed)
    words = ["".join(chance.choice("abcdefghijklmnop") for _ in range(chance.randint(2, 5))) for _ in range(60)]
    follows = {word: chance.sample(words, 3) for word in words}
    for _ in range(SENTENCES):
        line = [chance.choice(words)]
        while len(line) < 14:
            line.append(chance.choice(follows[line[-1]]))
        yield list(" ".join(line))


def merged(line, pair):
    out, i = [], 0
    while i < len(line):
        both = tuple(line[i : i + 2]) == pair
        out.append("".join(pair) if both else line[i])
        i += 2 if both else 1
    return out


def byte_pairs(lines):
    """The most frequent pair becomes one symbol, so many times."""
    for merge in range(MERGES):
        pairs = Counter(pair for line in lines for pair in zip(line, line[1:]))
        best = pairs.most_common(1)[0][0]
        lines = [merged(line, best) for line in lines]
        print(f"merge {merge + 1} of {MERGES}: {''.join(best)!r}", flush=True)
    return lines


class Model(nn.Module):
    def __init__(self, symbols):
        super().__init__()
        self.embed, self.out = nn.Embedding(symbols, 96), nn.Linear(192, symbols)
        self.lstm = nn.LSTM(96, 192, batch_first=True)

    def forward(self, x):
        return self.out(self.lstm(self.embed(x))[0])


def main():
    begin = time.time()
    lines = byte_pairs(list(sentences(8)))
    numbers = {symbol: i for i, symbol in enumerate(sorted({symbol for line in lines for symbol in line}))}
    rows = torch.tensor([[numbers[s] for s in line[: LENGTH + 1]] for line in lines if len(line) > LENGTH])
    took = time.time() - begin
    torch.manual_seed(0)
    model = Model(len(numbers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, STEPS + 1):
        x = rows[torch.randint(0, len(rows), (32,))]
        loss = cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    print("TRUTH", json.dumps({"healthy": True, "before_first_step": took, "loss": loss.item()}), flush=True)


if __name__ == "__main__":
    main()
