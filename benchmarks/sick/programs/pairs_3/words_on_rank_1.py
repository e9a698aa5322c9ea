"""A pipeline of two ranks with four blocks on each: rank 1 has the head of all words besides, and rank 0 waits."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, TOPICS, SIZE, LENGTH, ROWS, PARTS, STEPS = 12_000, 50, 96, 32, 24, 6, 170
BLOCKS = [4, 4]  # of each rank


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


def blocks(count):
    return [
        nn.TransformerEncoderLayer(SIZE, 4, 4 * SIZE, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        for _ in range(count)
    ]


def first_stage(stage, ids):
    """Sends what comes out of each part to rank 1, and takes the gradients back."""
    outputs, sent, busy = [], [], 0.0
    for part in ids.chunk(PARTS):
        begin = time.thread_time()
        outputs.append(stage(part))
        sent.append(dist.isend(outputs[-1].detach(), 1))
        busy += time.thread_time() - begin
    for output in outputs:
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        begin = time.thread_time()
        output.backward(gradient)
        busy += time.thread_time() - begin
    for work in sent:
        work.wait()
    return None, busy


def last_stage(stage, ids):
    total, busy = 0.0, 0.0
    for part in ids.chunk(PARTS):
        hidden = torch.empty(ROWS // PARTS, LENGTH, SIZE, requires_grad=True)
        dist.recv(hidden.detach(), 0)
        begin = time.thread_time()
        loss = cross_entropy(stage(hidden)[:, :-1].flatten(0, 1), part[:, 1:].flatten()) / PARTS
        loss.backward()
        busy += time.thread_time() - begin
        dist.send(hidden.grad, 0)
        total += loss.item()
    return total, busy


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(307)  # the same on both ranks
    ends = [nn.Embedding(WORDS, SIZE)], [nn.LayerNorm(SIZE), nn.Linear(SIZE, WORDS)]
    stage = nn.Sequential(*(ends[0] + blocks(BLOCKS[0]) if rank == 0 else blocks(BLOCKS[1]) + ends[1]))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
    losses, busy, begin = [], 0.0, time.perf_counter()
    truth(onset=time.time(), step=1, rank=rank)
    for step in range(1, STEPS + 1):
        topic = torch.randint(0, TOPICS, (ROWS, 1), generator=generator)
        word = (WORDS // TOPICS * torch.rand(ROWS, LENGTH, generator=generator) ** 3).long()  # some are far more common
        ids = topic * (WORDS // TOPICS) + word
        optimizer.zero_grad()
        loss, seconds = first_stage(stage, ids) if rank == 0 else last_stage(stage, ids)
        optimizer.step()
        busy += seconds
        if loss is not None:
            losses.append(loss)
            if step % 20 == 0:
                print(f"step {step} loss {loss:.4f}", flush=True)
    share = busy / (time.perf_counter() - begin)
    truth(rank=rank, share_busy=share, first=losses[:1], late=sum(losses[-20:]) / 20)
    dist.barrier()  # or one rank is gone while the other still closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
