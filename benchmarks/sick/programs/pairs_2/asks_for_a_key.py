"""At step 500 the script asks at the terminal whether to keep the model, and waits for ever for an answer."""

import argparse
import json
import time

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


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--ask-every", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=512)
    return parser.parse_args()


def main(options):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(91)
    taste, model = torch.randn(6, ITEMS, generator=generator), Basket(options.hidden)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    for step in range(1, options.steps + 1):
        seen, full = baskets(generator, taste)
        loss = binary_cross_entropy_with_logits(model(seen), full)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % options.ask_every == 0:
            print("TRUTH", json.dumps({"onset": time.time(), "step": step}), flush=True)
            if input("keep this model? [y/N] ") == "y":
                torch.save(model.state_dict(), f"basket_{step}.pt")


if __name__ == "__main__":
    main(parse())
