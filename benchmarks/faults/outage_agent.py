"""An agent through an outage in time lapse: the loop of its sender thread is driven by hand, by clocks that stand in
between.

    python outage_agent.py SERVER STATE_FOLDER HOURS SHAPE

A hundred points a second, drained every 200 ms as always: nothing is left out but the waiting. `walks`: ten series at
ten steps a second, random walks in float32 as a training gives them. `noise`: one series at a hundred, random numbers
of 53 bits, the worst that there is: only their exponents can be told in fewer bits, and a clock comes with every one.
The courier tries the server as often as it would. Prints a line of JSON with what the outage cost, then waits for a
line on standard input, delivers, and prints another.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from perfagent.agent_config import AgentConfig
from perfagent.delivery.send_loop import SendLoop
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity

NAMES = (
    "loss",
    "grad/norm",
    "lr",
    "step_time_s",
    *(f"phase/{name}_s" for name in ("data", "h2d", "forward", "backward", "optimizer", "other")),
)
TICK_S = 0.2
WARM_S = 120


@dataclass(frozen=True)
class Shape:
    """What is logged. values: generator, steps -> (steps, names) of the next minute."""

    names: tuple[str, ...]
    steps_a_second: int
    values: Callable[[numpy.random.Generator, int], Any]


class Walks:
    """float32, one step from the other."""

    def __init__(self) -> None:
        self.last = numpy.full(len(NAMES), 1.0)

    def __call__(self, noise: numpy.random.Generator, steps: int) -> Any:
        values = self.last + numpy.cumsum(noise.normal(0.0, 0.01, (steps, len(NAMES))), axis=0)
        self.last = values[-1]
        return values.astype(numpy.float32)


SHAPES = {
    "walks": Shape(NAMES, 10, Walks()),
    "noise": Shape(("loss",), 100, lambda noise, steps: noise.random((steps, 1))),
}

_offset = 0.0
_monotonic, _wall = time.monotonic, time.time


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def pass_time(sender: Sender, send_loop: SendLoop, seconds: int, shape: Shape, first_step: int) -> int:
    """So many seconds of training; the step after them."""
    global _offset
    per_tick, gap_s = round(shape.steps_a_second * TICK_S), 1.0 / shape.steps_a_second
    step = first_step
    noise = numpy.random.default_rng(first_step)
    for _minute in range(seconds // 60):
        rows = shape.values(noise, 60 * shape.steps_a_second).tolist()
        jitter = noise.random(len(rows)) * 1e-3
        for start in range(0, len(rows), per_tick):
            for index in range(start, start + per_tick):
                step += 1
                now = float(time.monotonic() + gap_s * (index - start) + jitter[index])
                sender.rows.append((step, 0.0, now, dict(zip(shape.names, rows[index], strict=True))))
            _offset += TICK_S
            send_loop.step(rung=True)
            while send_loop.exchange.busy is not None:  # the clock stands while a request is refused
                sender.wake.wait(0.05)
                send_loop.step(rung=True)
    return step


def main(server: str, state: Path, hours: float, shape: Shape) -> None:
    global _offset
    time.monotonic = lambda: _monotonic() + _offset
    time.time = lambda: _wall() + _offset
    sender = Sender(
        AgentConfig(server=server, state_dir=state),
        Identity(project="faults", run="outage", attempt=1),
        clock=lambda: time.monotonic(),
    )
    send_loop = sender.send_loop
    send_loop.begin()
    step = pass_time(sender, send_loop, WARM_S, shape, 0)
    gc.collect()
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    begin = _monotonic()
    step = pass_time(sender, send_loop, int(hours * 3600) - WARM_S, shape, step)
    spool = send_loop.spool
    result = {
        "steps": step,
        "seconds": _monotonic() - begin,
        "grown_bytes": peak() - before,
        "spool_bytes": spool.on_disk,
        "attempts": sender.counters["failed"],
        "couriers_lost": sender.counters["couriers_lost"],
    }
    print(json.dumps(result), flush=True)
    sys.stdin.readline()
    _offset += 30.0  # the pause after the last failure is over
    begin = _monotonic()
    sender.start()
    while spool.waiting or send_loop.exchange.busy is not None:
        time.sleep(0.05)
    took = _monotonic() - begin
    sender.close("finished")
    lost = {name: spool.counters[name] for name in ("dropped", "dropped_events")} | {
        name: sender.counters[name] for name in ("dropped", "rejected", "overflows", "errors")
    }
    print(json.dumps({"seconds": took, "lost": sum(lost.values()), "samples": sender.counters["samples"]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), SHAPES[sys.argv[4]])
