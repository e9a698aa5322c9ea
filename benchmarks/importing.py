"""How long `perfagent import` takes for a folder of old runs, and whether all of them are there, also after kills on the way.

    PYTHONPATH=benchmarks:tests python benchmarks/importing.py [--runs 200] [--kills 20] [--quick] [--write]

TensorBoard files of 20 series over 5,000 steps are imported into a new server on this machine: once without a stop, and once
killed (the command with its processes) after each tenth of the time that a try takes. Then each series of each run must have its
5,000 samples, once each. The bar is 3 minutes for 200 runs (20 million samples) without a stop.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import event_files
import tables
from builders import ServerProcess, job_environment, server_process

RUNS, SERIES, STEPS, KILLS, MOST_S = 200, 20, 5_000, 20, 180.0
NAMES = ("train/loss", "lr", "grad_norm", "val/loss", *(f"metric/{number}" for number in range(SERIES - 4)))


def write_runs(folder: Path, count: int) -> int:
    """Bytes."""
    noise = random.Random(0)
    falling = [2.5 * 0.999**step + 0.1 for step in range(STEPS)]
    size = 0
    for number in range(count):
        series = {name: [noise.random() for _ in range(STEPS)] for name in NAMES[4:]}
        series |= {name: [value + 0.05 * noise.random() for value in falling] for name in NAMES[:4:3]}
        series |= {"lr": [1e-3] * STEPS, "grad_norm": [1.0 + 0.1 * noise.random() for _ in range(STEPS)]}
        size += event_files.write(folder / f"run{number:03}", series).stat().st_size
    return size


def started(folder: Path, server: ServerProcess) -> subprocess.Popen[bytes]:
    environment = job_environment(folder.parent / "job", PERFAGENT_SERVER=server.url)
    command = [sys.executable, "-m", "perfagent", "import", str(folder), "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)


def imported(folder: Path, server: ServerProcess) -> float:
    began = time.monotonic()
    with started(folder, server) as process:
        process.communicate()
    if process.returncode:
        raise SystemExit(f"the import ended with {process.returncode}")
    return time.monotonic() - began


def killed(folder: Path, server: ServerProcess, kills: int, after_s: float) -> None:
    for _ in range(kills):
        with started(folder, server) as process:
            time.sleep(after_s)
            os.killpg(process.pid, signal.SIGKILL)


def wrong(server: ServerProcess) -> list[str]:
    """Series that do not have each of their samples once."""
    found = []
    listed = server.get("/runs", limit=1000)["runs"]
    for run in listed:
        asked: dict[str, Any] = {"points": STEPS, "rank": 0}
        for name in NAMES:
            series = server.get(f"/runs/{run['run']}/series", name=name, **asked)
            if series["count"] != [1] * STEPS or series["step"] != list(range(1, STEPS + 1)):
                found.append(f"{run['name']} {name}: {sum(series['count'])} samples")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--quick", action="store_true", help="20 runs, 4 kills")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.kills = 20, 4
    rows, bad, took_s = [], list[str](), 0.0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "runs"
        size = write_runs(folder, options.runs)
        for kills in (0, options.kills):
            with server_process(Path(place) / f"server{kills}") as server:
                if kills:
                    killed(folder, server, kills, after_s=max(2.0, took_s / 10))
                else:
                    took_s = imported(folder, server)
                rest_s, again_s = (
                    (imported(folder, server) for _ in range(2)) if kills else (took_s, imported(folder, server))
                )
                lost = wrong(server)
                count = len(server.get("/runs", limit=1000)["runs"])
                bad += lost + ([] if count == options.runs else [f"{count} runs"])
                rows.append([str(kills), f"{rest_s:.0f} s", f"{again_s:.0f} s", str(count), str(len(lost))])
    samples = options.runs * SERIES * STEPS
    head = ["kills before", "the rest took", "the same again", "runs there", "series that lack or double a sample"]
    text = (
        f"{tables.machine()}. Imported: {options.runs} TensorBoard runs, {samples / 1e6:g} million samples, "
        f"{size / 2**20:.0f} MiB. The server runs on the same machine as the command."
        f"\n\n{tables.table(head, rows)}"
    )
    print(text, *bad, sep="\n")
    if options.write:
        tables.replace("import", text)
    return int(bool(bad) or took_s > MOST_S)


if __name__ == "__main__":
    sys.exit(main())
