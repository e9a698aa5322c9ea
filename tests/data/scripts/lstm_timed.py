"""A character LSTM with its own batches, evaluation in between and clipping; clears the gradients right before
backward.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--iters", type=int, default=40)
parser.add_argument("--eval-every", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(3)
torch.set_num_threads(1)
text = Path(__file__).read_text(encoding="utf-8")
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])


class CharLSTM(nn.Module):
    def __init__(self, vocab, width=96, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.1)
        self.out = nn.Linear(width, vocab)

    def forward(self, x, state=None):
        y, state = self.lstm(self.embed(x), state)
        return self.out(y), state


def batch(size=8, length=32):
    at = torch.randint(len(data) - length - 1, (size,))
    return torch.stack([data[i : i + length] for i in at]), torch.stack([data[i + 1 : i + length + 1] for i in at])


model = CharLSTM(len(chars))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
timers = []
for it in range(1, args.iters + 1):
    x, y = batch()
    t0 = time.perf_counter()
    logits, _ = model(x)
    loss = criterion(logits.flatten(0, 1), y.flatten())
    t1 = time.perf_counter()
    optimizer.zero_grad()
    t2 = time.perf_counter()
    loss.backward()
    t3 = time.perf_counter()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    t4 = time.perf_counter()
    optimizer.step()
    t5 = time.perf_counter()
    timers.append({"forward": t1 - t0, "backward": t3 - t2, "optimizer": t5 - t4})
    print(f"step {it}: loss {loss.item()!r}")
    if it % args.eval_every == 0:
        model.eval()
        with torch.no_grad():
            held_out = [
                criterion(model(a)[0].flatten(0, 1), b.flatten()).item() for a, b in (batch() for _ in range(4))
            ]
        model.train()
        print(f"held out: {sum(held_out) / len(held_out):.4f}")
print("TIMERS", json.dumps(timers))
