"""Healthy: preempted at step 501 with all state brought back: weights, optimizer, schedule and data go on."""

import io
import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, CUT, BATCH, VOCABULARY, LENGTH = 800, 500, 64, 80, 24


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Model(nn.Module):
    def __init__(self, width=112):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.GRU(width, width, batch_first=True),
            nn.Linear(width, VOCABULARY),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def build():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.004)


def sentences(generator, rules):
    ids = [torch.randint(0, VOCABULARY, (BATCH,), generator=generator) for _ in range(2)]
    for _ in range(LENGTH - 1):
        ids.append(rules[ids[-2], ids[-1] % 5, torch.randint(0, 2, (BATCH,), generator=generator)])
    return torch.stack(ids, 1)


def train(model, optimizer, schedule, first, last):
    for step in range(first, last + 1):
        ids = sentences(generator, rules)
        loss = cross_entropy(model(ids[:, :-1])[:, 1:].flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"step {step} loss {losses[-1]:.4f} lr {rates[-1]:.4f}", flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(44)
rules = torch.randint(0, VOCABULARY, (VOCABULARY, 5, 2), generator=generator)
losses, rates = [], []
model, optimizer, schedule = build()
train(model, optimizer, schedule, 1, CUT)
checkpoint = io.BytesIO()
torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, checkpoint
)
checkpoint.seek(0)
state = torch.load(checkpoint)
model, optimizer, schedule = build()
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
schedule.load_state_dict(state["schedule"])
print(f"resumed after step {CUT}", flush=True)
train(model, optimizer, schedule, CUT + 1, STEPS)
truth(
    healthy=True,
    first=losses[0],
    before=sum(losses[CUT - 30 : CUT]) / 30,
    after=sum(losses[CUT + 10 : CUT + 60]) / 50,
    late=sum(losses[-30:]) / 30,
    rate_before=rates[CUT - 1],
    rate_after=rates[CUT],
)
