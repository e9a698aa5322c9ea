"""Healthy: a thread listens at the terminal for an s that would mean stop; none comes, and the training runs to its end."""

import argparse
import json
import os
import threading

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

ITEMS, BATCH = 400, 128


class Basket(nn.Module):
    """Guesses what else is in a basket of which it sees a half."""

    def __init__(self, hidden):
        super().__init__()
        self.see = nn.Linear(ITEMS, hidden)
        self.mix = nn.Sequential(nn.LayerNorm(hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU())
        self.say = nn.Linear(hidden, ITEMS)

    def forward(self, basket):
        return self.say(self.mix(self.see(basket)))


def baskets(generator, taste):
    shopper = torch.randn(BATCH, taste.shape[0], generator=generator)
    full = torch.bernoulli(torch.sigmoid(1.5 * shopper @ taste - 2), generator=generator)
    seen = full * torch.bernoulli(torch.full(full.shape, 0.5), generator=generator)
    return seen, full


class Listener(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.stop = False

    def run(self):
        while key := os.read(0, 1):
            self.stop = self.stop or key == b"s"


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--hidden", type=int, default=512)
    return parser.parse_args()


def main(options):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(91)
    taste, model = torch.randn(6, ITEMS, generator=generator), Basket(options.hidden)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    listener = Listener()
    listener.start()
    for step in range(1, options.steps + 1):
        seen, full = baskets(generator, taste)
        loss = binary_cross_entropy_with_logits(model(seen), full)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if listener.stop:
            break
    print("TRUTH", json.dumps({"healthy": True, "step": step, "loss": loss.item()}), flush=True)


if __name__ == "__main__":
    main(parse())
