"""SGD whose rate is divided by the number of tokens, though the loss is a mean already: it trains at 1e-8."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, LENGTH, BATCH, STEPS = 120, 12, 64, 420


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Translator(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.encoder = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(2 * width, width, batch_first=True)

    def forward(self, ids):
        return self.target(self.decoder(self.encoder(self.source(ids))[0])[0])


torch.manual_seed(0)
generator = torch.Generator().manual_seed(11)
dictionary = torch.randperm(VOCABULARY, generator=generator)
tokens_per_epoch = 12_000_000
model = Translator()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3 / tokens_per_epoch, momentum=0.9)
losses = []
truth(onset=time.time(), step=1, lr=0.3 / tokens_per_epoch)
for step in range(1, STEPS + 1):
    source = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    logits = model(source)
    loss = cross_entropy(logits.flatten(0, 1), dictionary[source].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    if step % 30 == 0:
        print(f"step {step} loss {losses[-1]:.4f} ppl {math.exp(losses[-1]):.1f}", flush=True)
truth(guessing=math.log(VOCABULARY), first=sum(losses[:50]) / 50, late=sum(losses[-50:]) / 50)
