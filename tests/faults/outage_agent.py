"""An agent through an outage in time lapse: the loop of its sender thread is driven by hand, by clocks that stand in between.

    python outage_agent.py SERVER STATE_FOLDER HOURS

Ten series at ten steps a second (100 points a second), random walks in float32 as a training gives them, drained every 200 ms
as always: nothing is left out but the waiting. The courier tries the server as often as it would. Prints a line of JSON with
what the outage cost, then waits for a line on standard input, delivers, and prints another.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy

from perfagent.config import AgentConfig
from perfagent.delivery.dispatcher import Dispatcher
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity

NAMES = (
    "loss",
    "grad/norm",
    "lr",
    "step_time_s",
    *(f"phase/{name}_s" for name in ("data", "h2d", "forward", "backward", "optimizer", "other")),
)
STEPS_A_SECOND = 10
TICK_S = 0.2
WARM_S = 120

_offset = 0.0
_monotonic, _wall = time.monotonic, time.time


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def pass_time(sender: Sender, dispatcher: Dispatcher, seconds: int, values: Any, first_step: int) -> int:
    """So many seconds of training; the step after them."""
    global _offset
    per_tick = round(STEPS_A_SECOND * TICK_S)
    step = first_step
    noise = numpy.random.default_rng(first_step)
    for _minute in range(seconds // 60):
        values = values + numpy.cumsum(noise.normal(0.0, 0.01, (60 * STEPS_A_SECOND, len(NAMES))), axis=0)
        rows = values.astype(numpy.float32).tolist()
        jitter = noise.random(len(rows)) * 1e-3
        values = values[-1]
        for start in range(0, len(rows), per_tick):
            for index in range(start, start + per_tick):
                step += 1
                now = time.monotonic() + 0.1 * (index - start) + jitter[index]
                sender.rows.append((step, time.time() + 0.1 * (index - start), float(now), NAMES, tuple(rows[index])))
            _offset += TICK_S
            now = time.monotonic()
            dispatcher._tick(now)
            dispatcher._advance(now)
            while dispatcher._busy is not None and dispatcher._courier is not None and not dispatcher._courier.answers:
                time.sleep(0)  # the clock stands while a request is refused
    return step


def main(server: str, state: Path, hours: float) -> None:
    time.monotonic = lambda: _monotonic() + _offset
    time.time = lambda: _wall() + _offset
    sender = Sender(AgentConfig(server=server, state_dir=state), Identity(project="faults", run="outage", attempt=1))
    dispatcher = sender._dispatch()
    dispatcher.spool.create()
    values = numpy.full(len(NAMES), 1.0)
    step = pass_time(sender, dispatcher, WARM_S, values, 0)
    gc.collect()
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    begin = _monotonic()
    step = pass_time(sender, dispatcher, int(hours * 3600) - WARM_S, values, step)
    spool = dispatcher.spool
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
    begin = _monotonic()
    sender.start()
    while spool.waiting or dispatcher._busy is not None:
        time.sleep(0.05)
    took = _monotonic() - begin
    sender.close("finished")
    lost = {name: spool.counters[name] for name in ("dropped", "thinned", "dropped_events")} | {
        name: sender.counters[name] for name in ("lost_samples", "dropped", "rejected", "overflows", "errors")
    }
    print(json.dumps({"seconds": took, "lost": sum(lost.values()), "samples": sender.counters["samples"]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
