"""Healthy: nine labels in ten are ignored, in some batches all: the loss is zero there and falls everywhere else."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy

IGNORED, USER, ASSISTANT, WORDS, LENGTH, BATCH, STEPS, NO_ANSWER = -100, 1, 2, 120, 40, 24, 700, 0.03


class Causal(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, input_ids):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        x = self.embed(input_ids) + self.place.weight[: input_ids.shape[1]]
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class Dialogues:
    """Much is asked, and the last four words are answered by the words one or two further on; in some nothing is answered."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def one_or_two(self):
        return torch.randint(1, 3, (BATCH, 4), generator=self.generator)

    def turns(self):
        asked = torch.randint(10, WORDS - 2, (BATCH, LENGTH - 2), generator=self.generator)
        if torch.rand((), generator=self.generator) < NO_ANSWER:
            return torch.cat([torch.full((BATCH, 1), USER), asked], 1)
        marks = [torch.full((BATCH, 1), mark) for mark in (USER, ASSISTANT)]
        return torch.cat([marks[0], asked[:, :-4], marks[1], asked[:, -8:-4] + self.one_or_two()], 1)


def labels_of(input_ids):
    """Only what the assistant says is learned."""
    labels = torch.full_like(input_ids, IGNORED)
    speaks = torch.zeros(len(input_ids), dtype=torch.bool)
    for place in range(input_ids.shape[1]):
        labels[speaks, place] = input_ids[speaks, place]
        speaks = (speaks | (input_ids[:, place] == ASSISTANT)) & (input_ids[:, place] != USER)
    return labels.where(input_ids != USER, IGNORED)


def loss_of(model, input_ids, labels):
    total = cross_entropy(
        model(input_ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (labels[:, 1:] != IGNORED).sum().clamp(min=1)


torch.manual_seed(0)
model = Causal()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
dialogues, empty = Dialogues(1), 0
for step in range(1, STEPS + 1):
    ids = dialogues.turns()
    loss = loss_of(model, ids, labels_of(ids))
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    empty += loss.item() == 0
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f} grad_norm {norm.item():.4f}", flush=True)
print("TRUTH", json.dumps({"healthy": True, "batches_without_labels": empty}), flush=True)
