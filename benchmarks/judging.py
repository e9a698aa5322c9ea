"""Whether a run that sends very much at once holds up the verdicts of others.

    PYTHONPATH=benchmarks:tests python benchmarks/judging.py [--steps 1000000] [--quick] [--write]

One run sends all its steps in frames as large as the server takes, as an import does. Meanwhile another run is asked for its
verdict twice a second, and sends a loss that is NaN every few seconds, each time as a new run: what counts is the slowest
answer, and the longest time from a NaN to its alert.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import tables
from api_builders import MSGPACK
from builders import ServerProcess, server_process, until
from frames import BEGIN, frame, rows, state

from perfagent.wire import encode

A_FRAME = 20_000  # steps
NAMES = ("loss", "lr", "grad/norm", "step_time_s", "samples_per_s")


def send_all(server: ServerProcess, steps: int) -> None:
    random = np.random.default_rng(0)
    with httpx.Client(timeout=120, trust_env=False) as http:
        for seq, begin in enumerate(range(0, steps, A_FRAME), 1):
            at = range(begin, min(begin + A_FRAME, steps))
            values = {name: (1.0 + 0.1 * random.standard_normal(len(at))).tolist() for name in NAMES}
            begun = [state("running", world_size=1)] if seq == 1 else []
            group = rows(values, list(at), [BEGIN + 0.1 * step for step in at])
            body = encode(frame(seq, *begun, group, run="import", name="import"))
            while (answer := http.post(f"{server.url}/api/v1/ingest", content=body, headers=MSGPACK)).status_code in (
                429,
                503,
            ):
                time.sleep(float(answer.headers.get("retry-after", 1)))
            answer.raise_for_status()


def slowest(server: ServerProcess, goes_on: Callable[[], bool]) -> tuple[list[float], list[float]]:
    """Seconds that verdicts took, and from a NaN until its alert."""
    answers, alerts = list[float](), list[float]()
    with httpx.Client(timeout=120, trust_env=False) as http:
        number = 0
        while goes_on():
            number += 1
            run = f"nan-{number}"
            found = [
                {"run": run, "step": step, "metrics": {"loss": 1.0 if step < 20 else "NaN"}} for step in range(1, 21)
            ]
            ident = http.post(f"{server.url}/api/v1/log", json=found).raise_for_status().json()["run"]
            sent = time.monotonic()
            while True:
                asked = time.monotonic()
                verdict = http.get(f"{server.url}/api/v1/runs/{ident}/verdict")
                answers.append(time.monotonic() - asked)
                if verdict.status_code == 200 and verdict.json()["rule"] == "nonfinite_loss":
                    break
                time.sleep(0.1)
            alerts.append(time.monotonic() - sent)
            time.sleep(0.4)
    return answers, alerts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    steps = options.steps or (100_000 if options.quick else 1_000_000)
    with (
        tempfile.TemporaryDirectory(prefix="perfagent-judging-") as folder,
        server_process(Path(folder) / "server") as server,
    ):
        begun = time.monotonic()
        sending = threading.Thread(target=send_all, args=(server, steps))
        sending.start()

        def is_judged() -> bool:
            lag = server.get("/self")["counters"]["rules"]
            return not sending.is_alive() and not lag["lag_frames"] and not lag["late_runs"]

        answers, alerts = slowest(server, lambda: not is_judged() and time.monotonic() - begun < 900)
        took = time.monotonic() - begun
        until(is_judged, within_s=5.0)
    text = (
        f"{tables.machine()}. {steps:,} steps of {len(NAMES)} series, sent at once, were judged within {took:.0f} s. Meanwhile "
        f"verdicts of other runs took {np.median(answers):.2f} s (median; slowest {max(answers):.1f} s of {len(answers)}), and "
        f"from a NaN of theirs to its alert {np.median(alerts):.1f} s (slowest {max(alerts):.1f} s of {len(alerts)})."
    )
    print(text)
    if options.write:
        tables.replace("judging", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
