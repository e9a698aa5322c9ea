"""What a call of another logger costs more because its scalars appear in the run: the patch around a body that does
nothing.

    PYTHONPATH=benchmarks python benchmarks/overhead/captured.py [--rounds N]

Blocks with and without a run in turn, least of many, as in isolated.py: `..._us` is what a call costs more. Of
TensorBoard's writer a number and a tensor, of the Trainer what it logs of a step, of W&B's `Run._log` ten scalars where
it is installed. Runs in the project's own environment, which has these libraries. `background_us` is what the agent's
threads take for one of these calls.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from blocks import CALLS, block_us
from torch.utils.tensorboard.writer import SummaryWriter
from transformers.trainer_callback import CallbackHandler

import perfagent
from perfagent.step.state import state

TRAINER = {"loss": 1.5, "grad_norm": 0.7, "learning_rate": 1e-4, "epoch": 0.5}
TEN = {f"train/{number}": float(number) for number in range(10)}


def nothing(*_: Any, **__: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    owners: list[tuple[Any, str]] = [(SummaryWriter, "add_scalar"), (CallbackHandler, "on_log")]
    if importlib.util.find_spec("wandb") is not None:
        from wandb.sdk.wandb_run import Run

        owners.append((Run, "_log"))
    for owner, name in owners:
        setattr(owner, name, nothing)
    writer, handler = SummaryWriter.__new__(SummaryWriter), CallbackHandler.__new__(CallbackHandler)
    run = perfagent.attach(project="bench")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1, requires_grad=True))], lr=0.0)
    optimizer.step()
    progress, step = state.current, SimpleNamespace(is_world_process_zero=True, global_step=1)
    assert progress is not None
    tensor = torch.ones(())
    calls: dict[str, Callable[[], object]] = {
        "add_scalar": lambda: writer.add_scalar("train/loss", 1.5, 7),
        "add_scalar_tensor": lambda: writer.add_scalar("train/loss", tensor, 7),
        "trainer": lambda: handler.on_log(None, step, None, TRAINER),
    }
    if len(owners) > 2:
        wandb_run = owners[2][0].__new__(owners[2][0])
        calls["wandb_10"] = lambda: wandb_run._log(TEN)
    least: dict[tuple[str, bool], float] = {}
    before, made = run._sender.cpu_s, 0
    for _ in range(rounds):
        for watched in (True, False):
            progress.logs.captures = watched
            if not watched:
                state.current = None
            for name, call in calls.items():
                least[name, watched] = min(block_us(call), least.get((name, watched), 1e9))
                made += CALLS * watched
            state.current = progress
        time.sleep(0.02)
    run._sender.flush(5.0)
    time.sleep(0.5)
    result = {f"{name}_us": least[name, True] - least[name, False] for name in calls}
    result["background_us"] = (run._sender.cpu_s - before) / made * 1e6
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
