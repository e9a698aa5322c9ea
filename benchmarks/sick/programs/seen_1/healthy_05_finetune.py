"""Fine-tune the last block and a new head of an encoder for topics; embeddings and the first blocks stay frozen."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import perfagent

TOPICS = {
    "sports": ["goal", "match", "team", "player", "season", "coach", "win", "league", "score", "cup"],
    "science": ["cell", "energy", "particle", "study", "theory", "data", "orbit", "gene", "lab", "physics"],
    "cooking": ["oven", "sugar", "butter", "recipe", "bake", "salt", "flour", "pan", "sauce", "taste"],
    "money": ["market", "bank", "stock", "price", "trade", "profit", "tax", "loan", "fund", "rate"],
}
COMMON = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "that",
    "is",
    "was",
    "for",
    "it",
    "with",
    "as",
    "on",
    "be",
    "at",
    "by",
    "this",
    "had",
    "not",
    "are",
    "but",
    "from",
    "or",
    "have",
    "an",
    "they",
    "which",
]
VOCAB = {w: i + 1 for i, w in enumerate(COMMON + [w for words in TOPICS.values() for w in words])}


def make_texts(n, rnd):
    examples = []
    for _ in range(n):
        label = rnd.randrange(4)
        words = rnd.choices(COMMON, k=rnd.randint(20, 28))
        topics = [*rnd.choices(list(TOPICS)[label : label + 1], k=4), *rnd.choices(list(TOPICS), k=2)]
        words += [rnd.choice(TOPICS[t]) for t in topics]
        rnd.shuffle(words)
        examples.append({"input_ids": torch.tensor([VOCAB[w] for w in words]), "label": label})
    return examples


class Encoder(nn.Module):
    def __init__(self, dim=96, layers=3):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB) + 1, dim, padding_idx=0)
        self.position = nn.Embedding(64, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~attention_mask)
        weights = attention_mask.unsqueeze(-1).float()
        return (self.norm(x) * weights).sum(1) / weights.sum(1)


class TopicModel(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(96, len(TOPICS))

    def forward(self, input_ids, attention_mask, labels):
        logits = self.classifier(self.encoder(input_ids, attention_mask))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(examples):
    input_ids = pad_sequence([e["input_ids"] for e in examples], batch_first=True)
    return {
        "input_ids": input_ids,
        "attention_mask": input_ids != 0,
        "labels": torch.tensor([e["label"] for e in examples]),
    }


torch.set_num_threads(1)
torch.manual_seed(0)
rnd = random.Random(0)
encoder = Encoder()  # `encoder.load_state_dict(...)` in real life
for module in (encoder.embed, encoder.position, *encoder.layers[:2]):
    module.requires_grad_(False)
model = TopicModel(encoder)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=5e-4, weight_decay=0.01)
perfagent.attach(model, optimizer)

train_loader = DataLoader(make_texts(12_000, rnd), batch_size=32, shuffle=True, collate_fn=collate)
test_loader = DataLoader(make_texts(512, rnd), batch_size=128, collate_fn=collate)
for epoch in range(2):
    model.train()
    for batch in train_loader:
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = [(model(**batch), batch["labels"]) for batch in test_loader]
    test_loss = sum(o["loss"].item() for o, _ in outputs) / len(outputs)
    hits = sum((o["logits"].argmax(1) == y).sum().item() for o, y in outputs)
    perfagent.log({"test_loss": test_loss, "test_accuracy": hits / 512})
    print(f"epoch {epoch}: loss {loss.item():.3f} test {test_loss:.3f} accuracy {hits / 512:.3f}")
