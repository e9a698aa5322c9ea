"""perfagent's training loop: mixed precision, accumulation, clipping, a schedule, checkpoints and an exact resume.

python examples/loop.py --steps 200 --checkpoints /tmp/perfagent-loop       # start it again: it goes on where it was
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--checkpoints", default="/tmp/perfagent-loop")
options = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(50_000, 64)
targets = inputs[:, :8].sum(dim=1, keepdim=True).sin()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)

perfagent.attach(model, optimizer, project="examples", name="loop")
loop = perfagent.loop(
    model, optimizer, schedule, precision="bf16" if device == "cuda" else "fp32", grad_accum=2, clip_norm=1.0,
    checkpoint=perfagent.Checkpoint(options.checkpoints, every=50, keep=2),
)  # fmt: skip
if loop.resume():
    print(f"goes on after step {loop.step_count}")
for x, y in loop.batches(loader, epochs=None, steps=options.steps):
    with loop.forward():
        loss = torch.nn.functional.mse_loss(model(x), y)
    loop.backward(loss, num_items=len(x))
    loop.step()
