"""A clean-up moves the folder of the checkpoints at step 450 and leaves a note in its place: each later save fails."""

import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import perfagent

SIZE, BATCH, STEPS, SAVE_EVERY, SWEEP = 40, 640, 900, 50, 450


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def sweep(folder, attic):
    """What the scratch disk does each night with folders that are too large."""
    shutil.move(folder, attic)
    folder.write_text(f"moved to {attic.name}\n")


def sample(rows, mixing, generator):
    x = torch.randn(rows, SIZE, generator=generator)
    return x, (x @ mixing).sin() + 0.1 * torch.randn(rows, mixing.shape[1], generator=generator)


torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(306)
mixing = torch.randn(SIZE, 6, generator=generator) / 6
valid = sample(2048, mixing, generator)
model = nn.Sequential(nn.Linear(SIZE, 640), nn.GELU(), nn.Linear(640, 640), nn.GELU(), nn.Linear(640, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
losses, saved, failed = [], [], []
with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch) / "checkpoints"
    checkpoint = perfagent.Checkpoint(folder, keep=2, best="min")
    for step in range(1, STEPS + 1):
        x, y = sample(BATCH, mixing, generator)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == SWEEP + 1:
            sweep(folder, Path(scratch) / "attic")
            truth(onset=time.time(), step=step)
        if step % SAVE_EVERY == 0:
            with torch.no_grad():
                error = mse_loss(model(valid[0]), valid[1]).item()
            try:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoint.save(step, state, metric=error)
                saved.append(step)
            except perfagent.CheckpointError as problem:  # rather a training without checkpoints than none
                print(f"could not save: {problem}", flush=True)
                failed.append(step)
            print(f"step {step} loss {losses[-1]:.4f} validation {error:.4f}", flush=True)
truth(saved=saved, failed=failed, first=losses[0], late=sum(losses[-25:]) / 25)
