"""The second file names the assistant otherwise: from step 301 on each label is ignored, loss and gradients are zero."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

IGNORED, USER, ASSISTANT, OTHER_ASSISTANT, WORDS, LENGTH, BATCH, STEPS, SECOND = -100, 1, 2, 3, 120, 40, 24, 600, 300


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
    """A question of ten words and an answer that says each again, one or two further on, in turn."""

    def __init__(self, assistant, seed):
        self.assistant, self.generator = assistant, torch.Generator().manual_seed(seed)

    def one_or_two(self, like):
        return torch.randint(1, 3, like.shape, generator=self.generator)

    def turns(self):
        ids = torch.empty(BATCH, 0, dtype=torch.long)
        while ids.shape[1] < LENGTH:
            asked = torch.randint(10, WORDS - 2, (BATCH, 9), generator=self.generator)
            marks = [torch.full((BATCH, 1), mark) for mark in (USER, self.assistant)]
            ids = torch.cat([ids, marks[0], asked, marks[1], asked + self.one_or_two(asked)], 1)
        return ids[:, :LENGTH]


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
files = Dialogues(ASSISTANT, 1), Dialogues(OTHER_ASSISTANT, 2)
for step in range(1, STEPS + 1):
    ids = files[step > SECOND].turns()
    loss = loss_of(model, ids, labels_of(ids))
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step == SECOND + 1:
        print("TRUTH", json.dumps({"onset": time.time(), "step": step}), flush=True)
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f} grad_norm {norm.item():.4f}", flush=True)
