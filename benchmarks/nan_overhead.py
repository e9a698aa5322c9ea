"""What the agent costs after a NaN: the mean of its own `agent/overhead_pct` over the 100 steps after it.

    python benchmarks/nan_overhead.py [--runs 5]

A perceptron of 8 layers (512 wide, 45 ms a step on one core) trains for 600 steps; the loss of step 300 is NaN, and so
are all later ones. The agent then dates the NaN, looks for its operator, and measures gradients more often. Each run is
a process of its own. The 100 steps before the NaN stand beside it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from perfagent.delivery.recording import read_recording

NAN_STEP, STEPS, AFTER = 300, 600, 100
LIMIT_PCT = 0.5

JOB = f"""
import sys, torch, perfagent
torch.manual_seed(0); torch.set_num_threads(1)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
run = perfagent.attach(model, optimizer, record=sys.argv[1])
x = torch.randn(512, 512)
for step in range(1, {STEPS} + 1):
    loss = model(x).square().mean()
    (loss * float("nan") if step == {NAN_STEP} else loss).backward()
    optimizer.step(); optimizer.zero_grad()
run.finish()
"""


def measure(folder: Path) -> tuple[float, float]:
    """Overhead in percent over the steps before the NaN, and after it."""
    subprocess.run([sys.executable, "-c", JOB, str(folder)], check=True, capture_output=True)
    readings: list[tuple[int, float]] = []
    for one in read_recording(folder):
        for group in one.groups:
            if "agent/overhead_pct" in group.values:
                readings += zip(group.steps(), group.column("agent/overhead_pct"), strict=True)
    return _mean(readings, NAN_STEP - AFTER, NAN_STEP), _mean(readings, NAN_STEP, NAN_STEP + AFTER)


def _mean(readings: list[tuple[int, float]], after: int, until: int) -> float:
    """Over the steps after..until; a reading stands for the steps since the one before."""
    spent, last = 0.0, None
    for step, percent in sorted(readings):
        if last is not None:
            spent += percent * max(0, min(step, until) - max(last, after))
        last = step
    return spent / (until - after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        found = [measure(Path(name) / str(run)) for run in range(runs)]
    before, after = (statistics.median(column) for column in zip(*found, strict=True))
    print(
        f"agent/overhead_pct, median of {runs} runs: {before:.2f} % before the NaN, {after:.2f} % after (bar {LIMIT_PCT})"
    )
    return 0 if after <= LIMIT_PCT else 1


if __name__ == "__main__":
    sys.exit(main())
