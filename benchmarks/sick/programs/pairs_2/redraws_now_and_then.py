"""Healthy: two ranks redraw sentences until one has a name in it: half of them at first, three of four later."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, LENGTH, BATCH, STEPS, TURN, NAMES = 200, 24, 32, 700, 300, 180


class Shard:
    """Sentences with tags: 1 where a name begins, 2 where it goes on, 0 elsewhere."""

    def __init__(self, seed, share):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, NAMES, (4000, LENGTH), generator=generator)
        has_name = torch.rand(4000, generator=generator) < share
        place = torch.randint(0, LENGTH - 1, (4000,), generator=generator)
        name = torch.randint(NAMES, WORDS, (4000,), generator=generator)
        self.words[has_name, place[has_name]] = name[has_name]
        self.tags = (self.words >= NAMES).long()
        goes_on = (self.words[:, :-1] >= NAMES) & (self.words[:, :-1] % 2 == 1)
        self.tags[:, 1:][goes_on] = 2
        self.generator = generator

    def draw(self, count):
        rows = []
        while len(rows) < count:  # a sentence without a name teaches nothing
            row = int(torch.randint(0, len(self.words), (), generator=self.generator))
            if self.tags[row].any():
                rows.append(row)
        return self.words[rows], self.tags[rows]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 32), nn.Linear(128, 3)
        self.gru = nn.GRU(32, 64, batch_first=True, bidirectional=True)

    def forward(self, words):
        return self.out(self.gru(self.embed(words))[0])


def average_gradients(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)
    for p, part in zip(
        model.parameters(), flat.div_(dist.get_world_size()).split([p.numel() for p in model.parameters()])
    ):
        p.grad.copy_(part.view_as(p))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    news, mail = Shard(20 + rank, 0.6), Shard(40 + rank, 0.25)
    for step in range(1, STEPS + 1):
        words, tags = (news if step <= TURN else mail).draw(BATCH)
        loss = cross_entropy(model(words).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if step % 25 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}\n", end="", flush=True)
    print(f"TRUTH {json.dumps({'healthy': True, 'rank': rank, 'loss': loss.item()})}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
