"""char-rnn on Python's own source code."""

import argparse
import argparse as some_text
import inspect
import typing as more_text

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="char-rnn")
parser.add_argument("--hidden", type=int, default=192)
parser.add_argument("--seq-len", type=int, default=48)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--iters", type=int, default=220)
parser.add_argument("--eval-interval", type=int, default=5)
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(1337)

text = inspect.getsource(some_text) + inspect.getsource(more_text)
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
n = int(0.8 * len(data))
train_data, val_data = data[:n], data[n:]
print(f"{len(data)} characters, {len(chars)} different")


class CharGRU(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, 64)
        self.rnn = nn.GRU(64, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, idx):
        h, _ = self.rnn(self.embed(idx))
        return self.head(h)


def get_batch():
    ix = torch.randint(len(train_data) - args.seq_len - 1, (args.batch,))
    x = torch.stack([train_data[i : i + args.seq_len] for i in ix])
    y = torch.stack([train_data[i + 1 : i + args.seq_len + 1] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    usable = (len(val_data) - 1) // args.seq_len * args.seq_len
    xs, ys = val_data[:usable].view(-1, args.seq_len), val_data[1 : usable + 1].view(-1, args.seq_len)
    losses = []
    for i in range(0, len(xs), args.batch):
        logits = model(xs[i : i + args.batch])
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), ys[i : i + args.batch].flatten()).item())
    model.train()
    return sum(losses) / len(losses)


model = CharGRU(len(chars), args.hidden)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for it in range(args.iters):
    if it % args.eval_interval == 0:
        print(f"iter {it}: val loss {estimate_loss(model):.4f}")
    x, y = get_batch()
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

idx = torch.tensor([[stoi["\n"]]])
with torch.no_grad():
    for _ in range(100):
        probs = model(idx[:, -64:])[:, -1].softmax(-1)
        idx = torch.cat([idx, torch.multinomial(probs, 1)], 1)
print("".join(chars[i] for i in idx[0]))
