"""One agent under load, as a process: logs until told to stop and keeps its own record of what it logged, for
comparison.

    python logging_agent.py RUN_ID STOP_FILE RECORD_FILE SEED

It ends when STOP_FILE appears. The record is a line `step name value` per value, written before the call that
logs it; `end` is its last line.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import perfagent

PERIOD_S = 0.005  # 200 calls of three values a second


def main(run_id: str, stop: Path, record: Path, seed: int) -> None:
    numbers = random.Random(seed)
    run = perfagent.init(run_id=run_id, project="faults")
    step = 0
    with record.open("w", encoding="ascii") as lines:
        while not stop.exists():
            step += 1
            values = {"alpha": numbers.random(), "beta": numbers.gauss(0.0, 1e6), "gamma": float(step)}
            for name, value in values.items():
                lines.write(f"{step} {name} {value.hex()}\n")
            run.log(values, step=step)
            time.sleep(PERIOD_S)
        lines.write("end\n")
    run.finish()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
