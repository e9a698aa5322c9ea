"""What `attach` costs the training thread per step, with nothing logged: steps with and without it in turn, in one process.

`tiny` has the tensors of `mlp` but almost no arithmetic, so that microseconds show beside it: its figure is the cost of the
hooks and of the values they put away. On `mlp` the periodic pass over the gradients weighs more and the noise is larger; its
figure is the check. Both are medians over pairs of neighbouring blocks of the difference of the blocks' mean CPU per step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch  # noqa: F401
from workloads import Workload, make

import perfagent


def block_us(workload: Workload, steps: int) -> float:
    """Mean CPU of the training thread per step, microseconds."""
    begin = time.thread_time()
    for _ in range(steps):
        workload.step()
    return (time.thread_time() - begin) / steps * 1e6


def paired_us(name: str, steps: int, pairs: int) -> float:
    """Median over pairs of (attached - not attached)."""
    workload = make(name)
    block_us(workload, steps)
    differences = []
    for _ in range(pairs):
        before = block_us(workload, steps)
        run = perfagent.attach(workload.model, workload.optimizer, project="bench")
        block_us(workload, max(20, steps // 10))  # the hooks settle: the first steps look for model and loader
        attached = block_us(workload, steps)
        run.finish()
        after = block_us(workload, steps)
        differences.append(attached - (before + after) / 2)
    return statistics.median(differences)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help="attached steps of the tiny workload, over all pairs")
    options = parser.parse_args()
    pairs = 5
    result = {
        "auto_us": paired_us("tiny", options.steps // pairs, pairs),
        "auto_mlp_us": paired_us("mlp", max(20, options.steps // 10 // pairs), pairs),
    }
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
