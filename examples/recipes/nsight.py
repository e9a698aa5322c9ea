"""Nsight Systems: a timeline of kernels, copies and the training's own phases, of ten steps in the middle of a run.

    python examples/recipes/nsight.py --print-command          # the command line for your machine
    nsys profile ... python examples/recipes/nsight.py --steps 100

Names of phases come from NVTX ranges; the steps from cudaProfilerStart and Stop, so that start-up and compiling are not
in the report. In it: gaps between kernels are the host's (or a .item()), copies that do not overlap want pinned memory,
GEMM kernels without "tensor" or "s16816" in their names do not use tensor cores, all-reduces should lie beside
backward. For a first look `perfagent profile RUN` needs no restart. Without a GPU the script trains and marks nothing.
"""

import argparse
import contextlib
import shlex
from collections.abc import Iterator

import torch

import perfagent

FIRST, STEPS = 20, 10  # after warm-up, compiling and the allocator's growth
COMMAND = [
    "nsys", "profile", "--show-output=true", "--trace=cuda,cudnn,cublas,nvtx", "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop", "--output=profile_report", "--force-overwrite=true", "python", "examples/recipes/nsight.py",
]  # fmt: skip

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--print-command", action="store_true")
options = parser.parse_args()
if options.print_command:
    raise SystemExit(print(shlex.join(COMMAND)))

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A named range of the timeline."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.nvtx.range(name):
        yield


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
perfagent.attach(model, optimizer, project="examples", name="nsight")
for step in range(options.steps):
    if device.type == "cuda" and step == FIRST:
        torch.cuda.profiler.start()
    with phase(f"step {step}"):
        with phase("data"):
            x = torch.randn(512, 256).to(device, non_blocking=True)
        with phase("forward"):
            loss = model(x).pow(2).mean()
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    if device.type == "cuda" and step == FIRST + STEPS - 1:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
print(f"{options.steps} steps on {device.type}, loss {loss.item():.4f}")
