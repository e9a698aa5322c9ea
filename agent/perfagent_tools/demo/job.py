"""The demo's training job: a training script with one line of perfagent that watches it, and its loop that trains it.

Run by `perfagent demo` as a process of its own: `python -m perfagent_tools.demo.job --steps 200 --fault none`; for the faults
of several ranks as one process for each, with the variables that torchrun would set.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import Subset, default_collate

import perfagent
from perfagent_tools.demo import data, faults
from perfagent_tools.demo.faults.life import is_let_go
from perfagent_tools.demo.model import GPT

LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
CLIP_NORM = 1.0
PRINT_EVERY = 10


def train(steps: int, fault: faults.Fault, *, batch_size: int, seed: int = 0) -> None:
    """Trains for `steps` optimizer steps, or longer if the fault says so, and prints a line every PRINT_EVERY steps."""
    torch.manual_seed(seed)
    # Half of the cores at most: torch's threads wait for each other by spinning, and the server wants to run too.
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 2) // 2 // fault.ranks)))
    # Ranks share the machine's cores, and talk by gloo: the demo needs no GPU, let alone several.
    device = torch.device("cuda" if torch.cuda.is_available() and fault.ranks == 1 else "cpu")
    if fault.ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if fault.ranks > 1 else 0

    gpt = GPT().to(device)
    model = perfagent.ddp(gpt) if fault.ranks > 1 else gpt
    optimizer = torch.optim.AdamW(fault.trained(model), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: _share_of_rate(done, steps) * fault.rate(done + 1, steps)
    )
    windows = data.Windows(data.read_sources(), gpt.context)
    drawn = Subset(windows, fault.windows(len(windows)))
    loader = data.loader(
        drawn, batch_size // fault.ranks, seed=seed, rank=rank, ranks=fault.ranks, shuffle=fault.shuffles
    )

    def collate(items: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        return [*fault.collated(*default_collate(items))]

    loader.collate_fn = collate
    job = faults.Job(model, optimizer, rank, steps, {})
    fault.prepare(job)

    perfagent.attach(
        model,
        optimizer,
        project=os.environ.get("PERFAGENT_PROJECT", "demo"),
        name=f"demo {fault.name}" if fault.name != "none" else "demo",
        config={
            "steps": steps,
            "batch_size": batch_size,
            "context": gpt.context,
            "lr": LEARNING_RATE,
            "fault": fault.name,
        },
        tags=("demo",),
    )

    # ---- the training loop
    loop = perfagent.loop(model, optimizer, schedule, precision=fault.precision, clip_norm=CLIP_NORM)
    last = sys.maxsize if fault.ends == "at the verdict" else steps
    for tokens, targets in loop.batches(loader, epochs=None, steps=last):
        step = loop.step_count + 1
        job.begun.append(time.perf_counter())
        fault.begin(job, step)
        tokens, targets = fault.batch(job, step, tokens, targets)  # noqa: PLW2901 - the batch as it is used
        with loop.forward():
            logits = model(tokens)
            fault.forward(job, step)
            token_losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            loss = fault.loss(job, step, token_losses)
        loop.backward(loss)
        loop.step()
        fault.end(job, step, logits.detach())
        if rank == 0 and (step % PRINT_EVERY == 0 or step == steps):
            print(f"step {step}/{steps} loss {loss.item():.4f}", flush=True)  # .item() waits for the device
        if step >= steps and last > steps and is_let_go():
            break
    if fault.ranks > 1:
        dist.destroy_process_group()


def _share_of_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth. step counts from 0."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--fault", default="none")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")  # warnings only: the demo has said the address of the run
    train(arguments.steps, faults.named(arguments.fault), batch_size=arguments.batch_size)


if __name__ == "__main__":
    main()
