"""The rows of the fault matrix about a server that is killed or stopped while jobs log. Each function is one row.

The oracle stands outside what is tested: the agents' own record of what they logged.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import ServerProcess, job_environment, server_process, sync, until
from faults.outcome import Outcome

HERE = Path(__file__).resolve().parent
STALL_LIMIT_S = 0.005
USUAL_LIMIT_S = 50e-6
EXIT_LIMIT_S = 2.0

Say = Callable[[str], None]


def server_killed_under_load(folder: Path, *, kills: int, agents: int = 4, say: Say = print) -> Outcome:
    """kill -9 of the server at random moments while agents log; counts the points that are stored exactly once."""
    server = ServerProcess(folder / "server").start()
    moments = random.Random(20)
    begin = time.monotonic()
    stop = folder / "stop"
    records = [folder / f"agent-{number}.txt" for number in range(agents)]
    variables = job_environment(folder, PERFAGENT_SERVER=server.url)
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "logging_agent.py"), f"load-{number}", str(stop), str(record), str(number)],
            env=variables,
            stderr=subprocess.DEVNULL,
        )
        for number, record in enumerate(records)
    ]
    starts_s: list[float] = []
    try:
        for number in range(1, kills + 1):
            time.sleep(moments.uniform(0.2, 1.5))  # at any point of an ingest, a compaction or a checkpoint
            server.kill()
            killed = time.monotonic()
            server.start()
            starts_s.append(time.monotonic() - killed)
            say(f"  kill {number}/{kills} after {time.monotonic() - begin:.0f} s")
        alive = sum(process.poll() is None for process in processes)
        stop.touch()
        for process in processes:
            process.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
    sync(variables)
    logged = stored_once = missing = repeated = changed = 0
    for number, record in enumerate(records):
        lines = record.read_text("ascii").splitlines()
        assert lines[-1] == "end", f"agent {number} did not reach its end"
        wanted = {
            (int(step), name): float.fromhex(value) for step, name, value in (line.split() for line in lines[:-1])
        }
        rows = [row for row in server.export(f"load-{number}") if row["name"] in ("alpha", "beta", "gamma")]
        counts = Counter((row["step"], row["name"]) for row in rows)
        values = {(row["step"], row["name"]): row["value"] for row in rows}
        logged += len(wanted)
        missing += sum(key not in counts for key in wanted)
        repeated += sum(count > 1 for count in counts.values())
        changed += sum(key in values and values[key] != value for key, value in wanted.items())
        stored_once += sum(counts[key] == 1 and values[key] == value for key, value in wanted.items())
    server.stop()
    figures = (
        f"{kills} kills, {agents} agents ({alive} still logging after the last): "
        f"{missing} missing, {repeated} twice, {changed} changed; slowest start {max(starts_s):.1f} s"
    )
    return Outcome(
        "S01", "server killed with SIGKILL under load: points stored exactly once", stored_once, logged, figures
    )


def server_stopped(folder: Path, *, seconds: float) -> list[Outcome]:
    """SIGSTOP of the server while a job logs: no call of the training thread stalls, and the job ends in time."""
    with server_process(folder / "server") as server:
        variables = job_environment(folder, PERFAGENT_SERVER=server.url)
        job = subprocess.Popen(
            [sys.executable, str(HERE / "stalled_agent.py"), str(seconds + 3.0)],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        until(lambda: server.find("/runs")["runs"], within_s=30.0, why="the job did not arrive at the server")
        server.signal(signal.SIGSTOP)
        try:
            output, _ = job.communicate(timeout=seconds + 90.0)
            ended = time.time()
        finally:
            server.signal(signal.SIGCONT)
            job.kill()
    result = _result(output)
    exit_s = ended - float(output.split("DONE ")[1].split()[0])
    above_s = result["slowest_s"] - result["control_slowest_s"]
    usual_s = result["p999_s"] - result["control_p999_s"]
    calm = Outcome(
        "A02",
        f"server stopped with SIGSTOP for {seconds:.0f} s: log calls at most 5 ms above a bare append, p99.9 at most 50 µs",
        int(above_s <= STALL_LIMIT_S and usual_s <= USUAL_LIMIT_S),
        1,
        f"{result['calls']} calls: slowest {result['slowest_s'] * 1e3:.2f} ms "
        f"(bare {result['control_slowest_s'] * 1e3:.2f} ms), "
        f"p99.9 {result['p999_s'] * 1e6:.0f} µs (bare {result['control_p999_s'] * 1e6:.1f} µs)",
    )
    left = Outcome(
        "A02",
        "server stopped with SIGSTOP: the process is gone within 2 s of main's end",
        int(exit_s <= EXIT_LIMIT_S and job.returncode == 0),
        1,
        f"{exit_s:.2f} s, exit code {job.returncode}",
    )
    return [calm, left]


def _result(output: str) -> dict[str, Any]:

    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return dict(json.loads(line.removeprefix("RESULT ")))
