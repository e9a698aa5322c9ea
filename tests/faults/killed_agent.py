"""An agent that logs a thousand times a second until it is killed, and says what it logged and when.

    python killed_agent.py RUN_ID [SERVER is in the environment]

One line `step seconds` per call on standard output, written before the call; seconds are of the monotonic clock.
"""

from __future__ import annotations

import os
import sys
import time

import perfagent


def main(run_id: str) -> None:
    run = perfagent.init(run_id=run_id, project="faults")
    step = 0
    while True:
        step += 1
        os.write(1, b"%d %.6f\n" % (step, time.monotonic()))
        run.log({"value": 0.5 * step}, step=step)
        time.sleep(0.001)


if __name__ == "__main__":
    main(sys.argv[1])
