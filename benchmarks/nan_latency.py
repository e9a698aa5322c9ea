"""How long from a NaN loss in training to the signed webhook at a local receiver: separate runs, one after the other.

    PYTHONPATH=benchmarks:tests python benchmarks/nan_latency.py [--runs 50] [--quick] [--write]

Every delivery is verified with the `standardwebhooks` package. --write puts the result into docs/evidence/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# the server process and the receiver are the tests' own
import standardwebhooks
import tables
from builders import Receiver, job_environment, server_process, until

JOB = Path(__file__).resolve().with_name("nan_job.py")
LIMIT_S = 2.0


def measure(runs: int, folder: Path) -> list[float]:
    """Seconds from NaN to receipt, infinity where nothing came within 20 s."""
    latencies = []
    with Receiver() as receiver, server_process(folder / "server", PERFAGENT_WEBHOOK_ALLOW=receiver.address) as server:
        channel = server.admin("POST", "/channels", {"name": "latency", "kind": "webhook", "url": receiver.url})
        verifier = standardwebhooks.Webhook(channel["secret"])
        for number in range(1, runs + 1):
            run = f"nan-{number}"
            variables = job_environment(folder, PERFAGENT_SERVER=server.url, PERFAGENT_RUN_ID=run)
            job = subprocess.run(
                [sys.executable, str(JOB), "40", "3"],
                env=variables,
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            began = float(next(line for line in job.stdout.splitlines() if line.startswith("NAN ")).split()[1])

            def received(run: str = run) -> list[float]:
                return [
                    delivery.received
                    for delivery in receiver.of_type("alert.firing")
                    if delivery.json["data"]["run"] == run and verifier.verify(delivery.body, delivery.headers)
                ]

            try:
                latencies.append(min(until(received, within_s=20.0)) - began)
            except AssertionError:
                latencies.append(float("inf"))
            print(f"  [{number}/{runs}] {latencies[-1]:.2f} s", file=sys.stderr, flush=True)
    return latencies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    runs = options.runs or (5 if options.quick else 50)
    with tempfile.TemporaryDirectory(prefix="perfagent-nan-") as folder:
        latencies = measure(runs, Path(folder))
    within = sum(value <= LIMIT_S for value in latencies)
    text = (
        f"{tables.machine('torch')}. In {within} of {runs} runs the webhook reached a local receiver within {LIMIT_S:.0f} s "
        f"of the NaN loss. Median: {statistics.median(latencies):.2f} s; slowest: "
        f"{max(latencies):.2f} s. All signatures were valid."
    )
    print(text)
    if options.write:
        tables.replace("nan", text)
    return 0 if within >= runs - max(1, runs // 50) else 1


if __name__ == "__main__":
    sys.exit(main())
