"""A transformer encoder with accumulation, bfloat16 autocast, warm-up schedule and a loader with a worker.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--accumulate", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(7)
torch.set_num_threads(1)


class Tagger(nn.Module):
    def __init__(self, vocab=200, width=64, tags=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, tags)

    def forward(self, tokens, labels):
        scores = self.head(self.encoder(self.embed(tokens)))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def zeros():
    return {"data": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}


if __name__ == "__main__":
    tokens = torch.randint(0, 200, (args.steps * args.accumulate * 8, 64))
    loader = DataLoader(TensorDataset(tokens, tokens % 12), batch_size=8, shuffle=True, num_workers=1)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    total, step, timers, spent = 0.0, 0, [], zeros()
    t0 = time.perf_counter()
    for number, (x, y) in enumerate(loader, start=1):
        t1 = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, labels=y)["loss"]
        t2 = time.perf_counter()
        loss = loss / args.accumulate
        total += loss.item()
        t3 = time.perf_counter()
        loss.backward()
        t4 = time.perf_counter()
        spent["data"] += t1 - t0
        spent["forward"] += t2 - t1
        spent["backward"] += t4 - t3
        if number % args.accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            t5 = time.perf_counter()
            optimizer.step()
            spent["optimizer"] += time.perf_counter() - t5
            timers.append(spent)
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            print(f"step {step}: loss {total!r}")
            total, spent = 0.0, zeros()
        t0 = time.perf_counter()
    print("TIMERS", json.dumps(timers))
