"""The rows of the fault matrix that need whole processes: kill -9, SIGSTOP, failing receivers. Each function is one
row.

Oracles stand outside what is tested: the agents' own record of what they logged, the receiver's own list of requests.
"""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import Receiver, ServerProcess, job_environment, server_process, until, web
from faults.outcome import Outcome

from perfagent.wire import Event, Frame, Group, encode

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
    try:
        for number in range(1, kills + 1):
            time.sleep(moments.uniform(0.2, 1.5))  # at any point of an ingest, a compaction or a checkpoint
            server.kill()
            server.start()
            say(f"  kill {number}/{kills} after {time.monotonic() - begin:.0f} s")
        alive = sum(process.poll() is None for process in processes)
        stop.touch()
        for process in processes:
            process.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
    # What an agent could not send before its end lies in its spool: `perfagent sync` uploads it, as a user would.
    subprocess.run(
        [sys.executable, "-m", "perfagent", "sync"], env=variables, check=True, capture_output=True, timeout=120
    )
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
        f"{missing} missing, {repeated} twice, {changed} changed"
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


def nan_frame(run: str, *, steps: int = 20) -> bytes:
    """What an agent sends for a run whose loss is NaN at its last step."""
    now = time.time()
    losses = [2.0 - 0.01 * step for step in range(1, steps)] + [float("nan")]
    group = Group(
        list(range(1, steps + 1)),
        [now - steps + i for i in range(steps)],
        [float(i) for i in range(steps)],
        {"loss": losses},
    )
    begun = Event(kind="state", time=now - steps, data={"state": "running"})
    return encode(
        Frame(
            project="faults",
            run=run,
            source=f"source-{run}",
            attempt=int(now * 1000),
            rank=0,
            seq=1,
            groups=[group],
            events=[begun],
        )
    )


def post(server: ServerProcess, frame: bytes) -> None:
    answer = web().post(
        f"{server.url}/api/v1/ingest",
        content=frame,
        headers={"Content-Type": "application/x-msgpack"},
        timeout=30.0,
    )
    assert answer.status_code == 200, answer.text


def killed_between_ack_and_judgement(folder: Path, *, trials: int, say: Say = print) -> Outcome:
    """kill -9 right after the ack of a NaN: the alert fires once after the restart, with one webhook id."""
    good = gaps = 0
    with Receiver() as receiver:
        server = ServerProcess(folder / "server", env={"PERFAGENT_WEBHOOK_ALLOW": receiver.address}).start()
        try:
            server.admin("POST", "/channels", {"name": "faults", "kind": "webhook", "url": receiver.url})
            for number in range(1, trials + 1):
                run = f"gap-{number}"
                frame = nan_frame(run)
                post(server, frame)
                server.kill()
                gaps += not _alerts_on_disk(server, run)
                server.start()

                def fired(run: str = run) -> list[Any]:
                    return [d for d in receiver.of_type("alert.firing") if d.json["data"]["run"] == run]

                try:
                    until(fired, within_s=30.0)
                except AssertionError:
                    say(f"  trial {number}: no webhook")
                    continue
                alerts = server.get(f"/runs/{run}/alerts")["alerts"]
                ids = {delivery.headers["webhook-id"] for delivery in fired()}
                good += len(alerts) == 1 and alerts[0]["rule"] == "nonfinite_loss" and len(ids) == 1
                say(f"  trial {number}/{trials}: {len(alerts)} alert, {len(ids)} webhook id")
        finally:
            server.stop()
    figures = f"{gaps} of {trials} kills hit before the alert was on disk"
    return Outcome(
        "W02", "server killed between the ack and the judgement of a NaN: the alert fires, once", good, trials, figures
    )


def _alerts_on_disk(server: ServerProcess, run: str) -> int:
    """Alerts of a run in the database file of a server that is dead."""
    path = next(
        path for path in (server.folder / "server-data").iterdir() if path.suffix in (".db", ".sqlite", ".sqlite3")
    )
    connection = sqlite3.connect(path)
    try:
        return int(connection.execute("SELECT count(*) FROM alert WHERE run = ?", (run,)).fetchone()[0])
    finally:
        connection.close()


def receiver_fails_and_server_dies(
    folder: Path, *, alerts: int, kills: int, within_s: float = 400.0, say: Say = print
) -> Outcome:
    """A receiver that refuses every third request, and kill -9 of the server in between: one id per alert, none
    missing."""
    with Receiver(lambda number: 503 if number % 3 == 0 else 200) as receiver:
        server = ServerProcess(folder / "server", env={"PERFAGENT_WEBHOOK_ALLOW": receiver.address}).start()
        try:
            server.admin("POST", "/channels", {"name": "faults", "kind": "webhook", "url": receiver.url})
            for number in range(1, alerts + 1):
                post(server, nan_frame(f"hook-{number}"))
                if number % max(1, alerts // kills) == 0:
                    time.sleep(random.Random(number).uniform(0.0, 0.3))  # before, during or after a delivery
                    server.kill()
                    server.start()

            def accepted() -> dict[str, set[str]]:
                """run -> ids of the deliveries that were answered with success."""
                ids: dict[str, set[str]] = {}
                for delivery in receiver.of_type("alert.firing"):
                    if delivery.status == 200:
                        ids.setdefault(delivery.json["data"]["run"], set()).add(delivery.headers["webhook-id"])
                return ids

            try:
                until(lambda: len(accepted()) == alerts, within_s=within_s, every_s=0.2)
            except AssertionError:
                say(f"  only {len(accepted())} of {alerts} alerts arrived")
            attempted: dict[str, set[str]] = {}
            for delivery in receiver.of_type("alert.firing"):
                attempted.setdefault(delivery.json["data"]["run"], set()).add(delivery.headers["webhook-id"])
            arrived = accepted()
            good = sum(
                len(attempted.get(f"hook-{n}", ())) == 1 and f"hook-{n}" in arrived for n in range(1, alerts + 1)
            )
            requests = len(receiver.of_type("alert.firing"))
            refused = sum(delivery.status == 503 for delivery in receiver.deliveries)
        finally:
            server.stop()
    figures = (
        f"{requests} requests, {refused} refused, {kills} kills; "
        f"every repeat carried the id of the first try: {good == alerts}"
    )
    name = "receiver refuses every third request, server killed in between: one id per alert, none missing"
    return Outcome("W01", name, good, alerts, figures)
