"""A resume whose names all begin with "module.": strict=False passes over each of them, and no weight is restored."""

import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

LETTERS, CONTEXT, BATCH, STOPPED, STEPS = 64, 40, 32, 600, 900


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class LetterModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 64)
        self.rnn = nn.GRU(64, 192, batch_first=True)
        self.head = nn.Linear(192, LETTERS)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def write_text(followers, generator):
    """Letters of which each has four that may come next, the first of them mostly."""
    text = torch.randint(0, LETTERS, (BATCH, CONTEXT + 1), generator=generator)
    choice = torch.multinomial(torch.tensor([0.7, 0.1, 0.1, 0.1]), BATCH * CONTEXT, True, generator=generator)
    for i, which in enumerate(choice.view(CONTEXT, BATCH)):
        text[:, i + 1] = followers[text[:, i], which]
    return text


def train(model, optimizer, first, last, followers, generator, losses):
    for step in range(first, last + 1):
        text = write_text(followers, generator)
        loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(303)
    followers = torch.randint(0, LETTERS, (LETTERS, 4), generator=generator)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        model = nn.DataParallel(LetterModel())  # on the machine with more than one card
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        train(model, optimizer, 1, STOPPED, followers, generator, losses)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STOPPED}, path)

        model = LetterModel()  # the next day, on one card
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        saved = torch.load(path)
        model.load_state_dict(saved["model"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
        print(f"resumed from {path.name} at step {saved['step']}", flush=True)
        truth(onset=time.time(), step=saved["step"] + 1)
        train(model, optimizer, saved["step"] + 1, STEPS, followers, generator, losses)
    truth(first=losses[0], before=losses[STOPPED - 1], after=losses[STOPPED], late=sum(losses[-20:]) / 20)


if __name__ == "__main__":
    main()
