"""Sentiment of short reviews with a small transformer encoder, in the manner of the HF examples."""

import random
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)

GOOD = ["great", "wonderful", "loved", "brilliant", "charming", "superb", "delightful"]
BAD = ["awful", "boring", "hated", "terrible", "dull", "dreadful", "annoying"]
FILLER = [
    "the",
    "film",
    "movie",
    "plot",
    "actor",
    "scene",
    "was",
    "and",
    "with",
    "in",
    "a",
    "very",
    "quite",
    "this",
    "story",
    "of",
    "one",
    "music",
    "ending",
]


def make_review(rnd):
    label = rnd.randrange(2)
    words = rnd.choices(FILLER, k=rnd.randint(6, 18))
    for _ in range(rnd.randint(1, 3)):
        words.insert(rnd.randrange(len(words)), rnd.choice((BAD, GOOD)[label]))
    return {"text": " ".join(words), "label": label}


class Tokenizer:
    pad_token_id = 0

    def __init__(self, words):
        self.vocab = {w: i + 2 for i, w in enumerate(sorted(set(words)))}
        self.vocab_size = len(self.vocab) + 2

    def __call__(self, texts, max_length=128):
        rows = [[self.vocab.get(w, 1) for w in t.split()][:max_length] for t in texts]
        return {
            "input_ids": torch.tensor([r + [self.pad_token_id] * (max_length - len(r)) for r in rows]),
            "attention_mask": torch.tensor([[1] * len(r) + [0] * (max_length - len(r)) for r in rows]),
        }


@dataclass
class ClassifierOutput:
    loss: torch.Tensor
    logits: torch.Tensor


class EncoderForSequenceClassification(nn.Module):
    def __init__(self, vocab_size, hidden=64, layers=2, heads=4, max_length=128):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden, padding_idx=0)
        self.positions = nn.Embedding(max_length, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 2 * hidden, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(hidden, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.embeddings(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1).float()
        logits = self.classifier((x * mask).sum(1) / mask.sum(1))
        return ClassifierOutput(nn.functional.cross_entropy(logits, labels), logits)


rnd = random.Random(0)
torch.manual_seed(0)
reviews = [make_review(rnd) for _ in range(2400)]
tokenizer = Tokenizer(GOOD + BAD + FILLER)


def collate(items):
    batch = tokenizer([item["text"] for item in items])
    batch["labels"] = torch.tensor([item["label"] for item in items])
    return batch


train_dataloader = DataLoader(reviews, batch_size=16, shuffle=True, collate_fn=collate)
model = EncoderForSequenceClassification(tokenizer.vocab_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(2):
    hits = 0
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hits += (outputs.logits.argmax(-1) == batch["labels"]).sum().item()
        if step % 50 == 0:
            print(f"epoch {epoch} step {step} loss {outputs.loss.item():.4f}")
    print(f"epoch {epoch} accuracy {hits / len(reviews):.3f}")
