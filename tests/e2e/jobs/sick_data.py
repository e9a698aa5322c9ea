"""Small trainings as people write them, one of each illness: python sick_data.py KIND SECONDS"""

import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import perfagent

kind, seconds = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        hidden = self.encoder(x)
        return self.head(hidden)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.head = nn.Linear(32, 500)

    def forward(self, tokens, labels=None):
        logits = self.head(self.embedding(tokens))
        return logits.square().mean() if labels is None else cross_entropy(logits.flatten(0, 1), labels.flatten())


class Everything(IterableDataset):
    """Of which each worker reads all."""

    def __iter__(self):
        make = torch.Generator().manual_seed(1)
        while True:
            yield torch.randn(32, generator=make), torch.randint(0, 5, (), generator=make)


if kind == "lengths":
    model = Tagger()
    loader = [torch.arange(2 * length).reshape(2, length) for length in (*range(3, 14), *range(3, 14))]
    step = torch.compile(model, backend="aot_eager", dynamic=False)
elif kind == "no_label":
    model = Tagger()
    data = [{"tokens": torch.randint(1, 500, (12,)), "labels": torch.full((12,), -100)} for _ in range(2000)]
    loader = DataLoader(data, batch_size=16, shuffle=True)
    step = lambda batch: model(**batch)  # noqa: E731
else:
    model = Classifier()
    y = torch.randint(0, 5, (4000,))
    if kind == "sorted":
        y = y.sort().values
    data = TensorDataset(torch.randn(4000, 32) + y[:, None] / 5, y)
    loader = DataLoader(data, batch_size=32, shuffle=kind != "sorted")
    if kind == "workers":
        loader = DataLoader(Everything(), batch_size=32, num_workers=2)
    step = lambda batch: cross_entropy(model(batch[0]), batch[1])  # noqa: E731

trained = model.head.parameters() if kind == "head_only" else model.parameters()
optimizer = torch.optim.AdamW(trained, lr=1e-3)
perfagent.attach(model)
end = time.monotonic() + seconds
while time.monotonic() < end:
    for batch in loader:
        loss = step(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        if time.monotonic() > end and kind != "lengths":
            break
