"""One small training per fault, each in a forked child, so that torch is imported once for all of them.

    python training.py FOLDER < CASES

CASES is JSON: [{"name", "attach", "env": {...}, "before": code, "during": code}, ...]; `before` runs ahead of attach(),
`during` at every tenth step with `step` and `run` in scope. A child writes the bits of every loss to NAME.losses, its
standard error to NAME.err, and ends by sys.exit(3), as a script does. For each child a line of JSON comes out: name,
exit code, and how long it took from the end of the loop to its end.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

EXIT_CODE = 3
STEPS = 60
PERIOD_S = 0.008
AT_ONCE = 3  # most of their time they wait


def end_quickly() -> None:
    """The exit code as it is; what is left out is the second that torch's modules take to be taken apart."""
    if getattr(sys, "last_type", None) is None and _child:
        os._exit(EXIT_CODE)


_child = False


def begin_child(case: dict[str, Any], folder: Path) -> None:
    global _child
    _child = True
    errors = os.open(folder / f"{case['name']}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(errors, 2)
    os.environ.update(case["env"])


def train(case: dict[str, Any], folder: Path) -> None:
    exec(case["before"], {})
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = None
    if case["attach"]:
        import perfagent

        began = time.monotonic()
        run = perfagent.attach(model, optimizer, run_id=case["name"], project="faults")
        took = time.monotonic() - began
        print(f"attach took {took:.3f}", file=sys.stderr)
    scope = {"run": run, "model": model, "optimizer": optimizer, "folder": folder}
    with (folder / f"{case['name']}.losses").open("w") as losses:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            inputs = torch.rand(16, 8)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            losses.write(f"{loss.item().hex()}\n")
            if run is not None:
                run.log({"seen": loss.item()}, step=step)
            if step % 10 == 0:
                exec(case["during"], scope | {"step": step})
            time.sleep(PERIOD_S)
    (folder / f"{case['name']}.ended").write_text(repr(time.monotonic()))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports what the first optimizer imports
    assert threading.active_count() == 1
    atexit.register(end_quickly)  # the first to be registered is the last to be called
    running: dict[int, str] = {}
    for case in json.load(sys.stdin):
        if len(running) == AT_ONCE:
            reap(running, folder)
        pid = os.fork()
        if pid == 0:
            begin_child(case, folder)
            train(case, folder)
            sys.exit(EXIT_CODE)
        running[pid] = case["name"]
    while running:
        reap(running, folder)


def reap(running: dict[int, str], folder: Path) -> None:
    pid, status = os.wait()
    name = running.pop(pid)
    ended = folder / f"{name}.ended"
    exit_s = time.monotonic() - float(ended.read_text()) if ended.exists() else None
    print(json.dumps({"name": name, "code": os.waitstatus_to_exitcode(status), "exit_s": exit_s}), flush=True)


if __name__ == "__main__":
    main()
