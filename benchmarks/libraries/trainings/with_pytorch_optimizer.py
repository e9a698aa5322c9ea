"""pytorch_optimizer: Lookahead around AdamW, then SOAP and Lion, one model each."""

import torch
import truth
from pytorch_optimizer import SOAP, Lion, Lookahead

truth.seed()
training, _ = truth.loaders()
models = [truth.Net() for _ in range(3)]
criterion = truth.Loss()


def train(model, optimizer):
    for _ in range(2):
        for x, y in training:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            truth.step(rate)  # Lookahead has no hooks of torch's


train(models[0], Lookahead(torch.optim.AdamW(models[0].parameters(), lr=0.01), k=3))
train(models[1], SOAP(models[1].parameters(), lr=0.003))
train(models[2], Lion(models[2].parameters(), lr=0.001))
truth.end(*models)
