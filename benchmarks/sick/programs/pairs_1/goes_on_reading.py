"""Healthy: preempted each 60 steps, and each life skips what its forerunners have read: no page comes twice."""

import io
import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

LIVES, STEPS_A_LIFE, BATCH, CONTEXT, LETTERS = 9, 60, 64, 12, 32


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def book(letters):
    """Windows of a long text in which a letter depends on two before it, seven times in ten."""
    generator = torch.Generator().manual_seed(45)
    text = torch.randint(0, LETTERS, (letters,), generator=generator)
    rule = torch.randint(0, LETTERS, (LETTERS, 6), generator=generator).tolist()
    free = (torch.rand(letters, generator=generator) < 0.3).tolist()
    written = text.tolist()
    for i in range(3, letters):
        if not free[i]:
            written[i] = rule[written[i - 1]][written[i - 3] % 6]
    windows = torch.tensor(written).unfold(0, CONTEXT + 1, CONTEXT)
    return TensorDataset(windows[:, :-1], windows[:, 1:])


def build():
    model = nn.Sequential(
        nn.Embedding(LETTERS, 64),
        nn.Flatten(),
        nn.Linear(64 * CONTEXT, 1280),
        nn.ReLU(),
        nn.Linear(1280, 1280),
        nn.ReLU(),
        nn.Linear(1280, LETTERS),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


torch.manual_seed(0)
pages = book(LIVES * STEPS_A_LIFE * BATCH * CONTEXT + CONTEXT)
model, optimizer = build()
state, step, losses, seen = None, 0, [], set()
for life in range(LIVES):
    if state:
        state.seek(0)
        saved = torch.load(state)
        model, optimizer = build()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(5)).tolist()
    rest = order[step * BATCH : (step + STEPS_A_LIFE) * BATCH]
    for x, y in DataLoader(pages, batch_size=BATCH, sampler=rest):
        step += 1
        loss = cross_entropy(model(x), y[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen.update(row.numpy().tobytes() for row in x)
        if step % 20 == 0:
            print(f"life {life} step {step} loss {losses[-1]:.4f}", flush=True)
    state = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state)
truth(healthy=True, rows_given=step * BATCH, rows_different=len(seen), first=losses[0], late=sum(losses[-30:]) / 30)
