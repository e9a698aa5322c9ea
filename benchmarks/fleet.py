"""337 runs with some 1,046 alerts on a server: a sweep of 200, 41 sick runs, the rest well. For looking at pages, and for
pages.py.

PYTHONPATH=benchmarks:tests python benchmarks/fleet.py http://127.0.0.1:8420
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from builders import ServerProcess
from recorded import record_run, send, training

from perfagent.wire import Event

RATES, DECAYS, DEPTHS, SEEDS = (1e-4, 3e-4, 1e-3, 3e-3), (0.0, 0.1), (2, 3, 4, 6, 8), range(5)
TALKING, ALERTS_EACH, FAILED, NANS, SILENT = 20, 50, 12, 4, 5
ALL = 337
AT_ONCE = TALKING * ALERTS_EACH + FAILED + NANS
"""Alerts that are there soon; those of silent and standing runs follow within a minute."""


@dataclass(frozen=True)
class At:
    """A server that is there already."""

    url: str


def state(word: str, **more: Any) -> Event:
    return Event(kind="state", time=time.time(), data={"state": word, "heartbeat": False, **more})


def sweep(server: ServerProcess) -> int:
    """Seeds of a setting lie closer together than settings do. Gives how many runs it has."""
    settings = [(rate, decay, depth, seed) for rate in RATES for decay in DECAYS for depth in DEPTHS for seed in SEEDS]
    steps = np.arange(1, 301)
    for number, (rate, decay, depth, seed) in enumerate(settings):
        values = training(steps, seed=number)
        level = 1.2 + 0.25 * abs(math.log10(rate) + 3.2) + 0.05 * abs(depth - 4) + 0.1 * decay
        values["val/acc"] = np.clip(1.3 - 0.5 * level + 0.01 * np.sin(seed) - 0.3 * np.exp(-steps / 80), 0.0, 1.0)
        config = {"lr": rate, "weight_decay": decay, "depth": depth, "seed": seed}
        events = [state("running", config=config, group=f"lr {rate:g}", tags=[f"depth-{depth}"]), state("finished")]
        send(server, f"sweep-{number:03}", values, steps, project="vision", events=events)
    return len(settings)


def sick(server: ServerProcess) -> int:
    steps = np.arange(1, 61)
    for number in range(TALKING):
        said = [{"title": f"reward below {one}", "level": "warning"} for one in range(ALERTS_EACH)]
        events = [state("running"), *(Event(kind="alert", time=time.time(), step=60, data=one) for one in said)]
        send(server, f"alerting-{number}", training(steps, seed=number), steps, project="policies", events=events)
    for number in range(FAILED):
        words = {
            "reason": "exit code 1", "exception": "IndexError: index 50257 is out of range",
            "traceback": 'File "train.py", line 41, in <module>',
        }  # fmt: skip
        events = [state("running"), state("failed", **words)]
        send(server, f"failed-{number}", training(steps, seed=number), steps, project="language", events=events)
    for number in range(NANS):
        values = training(steps, seed=number)
        values["loss"][40 + number :] = math.nan
        send(server, f"nan-{number}", values, steps, project="language", events=[state("running")])
    for number in range(SILENT):
        events = [Event(kind="state", time=time.time(), data={"state": "running"})]  # heard of no more
        send(server, f"silent-{number}", training(steps, seed=number), steps, project="language", events=events)
    return TALKING + FAILED + NANS + SILENT


def fleet(server: ServerProcess) -> None:
    there = sweep(server) + sick(server)
    for number in range(ALL - there):
        events = [state("running")] if number < 6 else [state("running"), state("finished")]
        record_run(server, f"well-{number}", project="language" if number % 2 else "vision", events=events)


if __name__ == "__main__":
    fleet(At(sys.argv[1].rstrip("/")))  # type: ignore[arg-type]
