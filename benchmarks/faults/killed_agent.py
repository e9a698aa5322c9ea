"""An agent that logs a thousand times a second until it is killed, and says what it logged and when.

    python killed_agent.py RUN_ID [SERVER is in the environment; TICKS, a folder, may be]

One line `step seconds` per call on standard output, written before the call; seconds are of the monotonic clock. One
line in TICKS/RUN_ID per tick that is over: the step of the newest call as it began, which may not have been made yet.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import perfagent

TICKS = os.environ.get("TICKS")


def main(run_id: str) -> None:
    run = perfagent.init(run_id=run_id, project="faults")
    step = 0
    if TICKS is not None:
        ticks = os.open(f"{TICKS}/{run_id}", os.O_WRONLY | os.O_CREAT, 0o600)
        send_loop = run._sender.send_loop
        drain = send_loop._drain

        def drained(*arguments: Any, **more: Any) -> None:
            newest = step
            drain(*arguments, **more)
            os.write(ticks, b"%d\n" % newest)

        send_loop._drain = drained  # type: ignore[method-assign]
    while True:
        step += 1
        os.write(1, b"%d %.6f\n" % (step, time.monotonic()))
        run.log({"value": 0.5 * step}, step=step)
        time.sleep(0.001)


if __name__ == "__main__":
    main(sys.argv[1])
