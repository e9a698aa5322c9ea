"""Reviews of about 40 tokens are padded to the model's limit of 320: seven eighths of the work is for padding."""

import json
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

PAD, WORDS, STARS, LIMIT, ROWS = 0, 800, 5, 320, 1600


def reviews():
    """A review has as many stars as most of its words say."""
    generator = torch.Generator().manual_seed(12)
    lengths = (
        (12 + 30 * torch.rand(ROWS, generator=generator).sqrt() + 300 * torch.rand(ROWS, generator=generator) ** 12)
        .long()
        .clamp(max=LIMIT)
    )
    for length in lengths.tolist():
        stars = int(torch.randint(0, STARS, (), generator=generator))
        tokens = torch.randint(1, WORDS, (length,), generator=generator)
        speaks = torch.rand(length, generator=generator) < 0.3
        tokens[speaks] = tokens[speaks] // STARS * STARS + stars
        yield {"input_ids": tokens.clamp(1, WORDS - 1), "labels": stars}


@dataclass
class Collator:
    """As a tokenizer with padding="max_length" does it."""

    length: int

    def __call__(self, features):
        ids = torch.full((len(features), self.length), PAD)
        for row, feature in zip(ids, features):
            row[: len(feature["input_ids"])] = feature["input_ids"]
        labels = torch.tensor([feature["labels"] for feature in features])
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


class Classifier(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width, padding_idx=PAD), nn.Embedding(LIMIT, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.out = nn.Linear(width, STARS)

    def forward(self, input_ids, attention_mask, labels):
        x = self.embed(input_ids) + 0.1 * self.place.weight[: input_ids.shape[1]]
        scores = self.query(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.masked_fill(attention_mask[:, None] == 0, -1e9).softmax(-1) @ self.value(x)
        x = x + self.mlp(x)
        mean = (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return {"loss": cross_entropy(self.out(mean), labels)}


class Trainer:
    def __init__(self, model, rows, collator, rate, epochs):
        self.model, self.epochs = model, epochs
        self.loader = DataLoader(rows, batch_size=16, shuffle=True, collate_fn=collator)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def train(self):
        step = 0
        for epoch in range(self.epochs):
            for batch in self.loader:
                loss = self.model(**batch)["loss"]
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                if step % 50 == 0:
                    print({"loss": round(loss.item(), 4), "epoch": epoch, "step": step}, flush=True)


torch.manual_seed(0)
rows = list(reviews())
print(
    "TRUTH",
    json.dumps({"onset": time.time(), "step": 1, "mean": sum(len(r["input_ids"]) for r in rows) / ROWS}),
    flush=True,
)
Trainer(Classifier(), rows, Collator(LIMIT), rate=1e-3, epochs=3).train()
