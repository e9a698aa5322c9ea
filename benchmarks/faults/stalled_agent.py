"""A training thread's view of a server that stands still: how long each log call takes, beside a bare copy of the dict
and an append in the same run, which is the least that any call can do.

    python stalled_agent.py SECONDS

Prints `RESULT {json}` with seconds: the slowest and the 99.9th percentile of calls and of the control, then ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque

import perfagent


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main(seconds: float) -> None:
    run = perfagent.init(project="faults", name="stalled")
    values = {f"value{i}": float(i) for i in range(10)}
    plain: deque[tuple[float, float, dict[str, float]]] = deque(maxlen=1000)
    calls: list[float] = []
    control: list[float] = []
    clock = time.perf_counter
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # both come first after a sleep, when caches are cold
        for call in (True, False) if len(calls) % 2 else (False, True):
            begin = clock()
            if call:
                run.log(values)
            else:
                plain.append((time.time(), time.monotonic(), dict(values)))
            took = clock() - begin
            (calls if call else control).append(took)
        time.sleep(0.001)  # the rest of a step; it also lets other threads in, as a step on the device would
    result = {
        "calls": len(calls),
        "slowest_s": max(calls),
        "p999_s": percentile(calls, 0.999),
        "control_slowest_s": max(control),
        "control_p999_s": percentile(control, 0.999),
    }
    print("RESULT " + json.dumps(result), flush=True)
    print(f"DONE {time.time()!r}", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
