"""The rows of the agent that need many rounds or a real server. Each function is one row; scripts/faults runs them in
full.

Oracles stand outside of what is tested: what a process said that it logged, what a server answers over HTTP.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from builders import ServerProcess, free_port, job_environment, server_process
from faults import loops, trainings
from faults.accounts import Accounts
from faults.outcome import Outcome
from faults.proxy import CUTS, Proxy
from ingest_server import IngestServer, Scripted

from perfagent.delivery.transport import HttpTransport
from perfagent.errors import ServerUnreachable

Say = Callable[[str], None]
LOST_S = 0.2
DAY_H = 24.0
GROWN_BYTES = 32 * 2**20
SPOOL_BYTES = 64 * 2**20


def slow_answers() -> Outcome:
    """A03: the deadline of a request, by the wall clock."""
    took = []
    for answer in (Scripted(delay_s=30.0), Scripted(body=b"x" * 1000, slow_s=1.0)):
        with IngestServer(rule=lambda _, answer=answer: answer) as server:  # type: ignore[misc]
            client = HttpTransport(server.url)
            began = time.monotonic()
            try:
                client.post(loops.frame_bytes())
            except ServerUnreachable:
                took.append(time.monotonic() - began)
            client.close()
    good = sum(9.9 <= seconds <= 10.6 for seconds in took)
    figures = f"given up after {', '.join(f'{seconds:.1f} s' for seconds in took)}"
    return Outcome(
        "A03",
        "answers of 30 s and of a byte a second: a request is given up after ten seconds in all",
        good,
        2,
        figures,
    )


def cut_connections(folder: Path, *, cuts: int) -> Outcome:
    """A04: a real server behind a proxy that cuts; counts the cuts after which every sample is stored exactly once."""
    books = Accounts(folder)
    with server_process(folder / "server") as server, Proxy(server.port, seed=4) as proxy:
        steps = loops.log_through(books, proxy, cuts=cuts, within_s=600.0)
        books.senders[0].close("finished")
        rows = [row for row in server.export("r") if row["name"] == "loss"]
        done, kinds = proxy.cuts, {kind: proxy.done[kind] for kind in (*CUTS, "twice")}
    counts = Counter(row["step"] for row in rows)
    missing, repeated = sum(step not in counts for step in range(steps)), sum(count > 1 for count in counts.values())
    good = done >= cuts and not missing and not repeated
    figures = (
        f"{steps} points: {missing} missing, {repeated} twice; {', '.join(f'{n} {kind}' for kind, n in kinds.items())}"
    )
    name = "connections cut in the request, in the answer, half-closed, repeated and reordered, by a seeded schedule"
    return Outcome("A04", name, done if good else 0, cuts if good else max(cuts, done), figures, required=cuts)


_LOGGED = {"walks": "ten series", "noise": "one series of random numbers"}


def long_outages(folder: Path, *, hours: float) -> list[Outcome]:
    return [_long_outage(folder / shape, shape, hours=hours) for shape in _LOGGED]


def _long_outage(folder: Path, shape: str, *, hours: float, say: Say = print) -> Outcome:
    """A05: hours at 100 points a second without a server, in time lapse, then a real one that gets everything."""
    folder.mkdir()
    server = ServerProcess(folder / "server", port=free_port())
    outage = loops.outage(folder, hours=hours, port=server.port, shape=shape)
    say(f"  the outage took {outage.seconds:.0f} s: {outage.spool_bytes / 2**20:.1f} MB of spool")
    points = outage.steps * len(outage.names)
    server.start()
    try:
        outage.deliver(within_s=3600.0)
        say(f"  delivered in {outage.delivered_s:.0f} s")
        counted = {}
        for name in outage.names:
            series = server.get("/runs/outage/series", name=name, points=1000)
            counted[name] = sum(series["count"]) if series["step"][0] == 1 else 0
    finally:
        server.stop()
    stored = sum(counted.values())
    within = outage.grown_bytes <= GROWN_BYTES and outage.spool_bytes <= SPOOL_BYTES * max(1.0, hours / DAY_H)
    exact = all(count == outage.steps for count in counted.values()) and outage.lost == 0
    figures = (
        f"memory grew by {outage.grown_bytes / 2**20:.1f} MB, spool {outage.spool_bytes / 2**20:.1f} MB, {outage.lost} dropped; "
        f"{outage.attempts} tries meanwhile, all delivered in {outage.delivered_s:.0f} s"
    )
    name = f"{hours:.0f} h without a server at 100 points a second of {_LOGGED[shape]} (time compressed): stored exactly once"
    return Outcome("A05", name, stored if within and exact else 0, points, figures)


def killed_agents(folder: Path, *, kills: int, say: Say = print) -> list[Outcome]:
    """A11: kill -9 of an agent at random moments; its next starts and `perfagent sync` deliver what it left."""
    seeded = random.Random(11)
    with server_process(folder / "server") as server:
        started = time.monotonic()
        variables = job_environment(folder, PERFAGENT_SERVER=server.url)
        found = []
        for number in range(1, kills + 1):
            found.append(loops.kill(number, seeded, variables))
            if number % 20 == 0:
                say(f"  kill {number}/{kills}")
        last = found[-1]
        server.wait_for_state(last.run, "lost", within_s=90.0)
        lost_after_s = time.monotonic() - last.at
        limit_s = max(35.0, 65.0 - (last.at - started))  # a server that was just started waits for a minute
        command = [sys.executable, "-m", "perfagent", "sync"]
        subprocess.run(command, env=variables, check=True, capture_output=True, timeout=300)
        losses, worst_calls, good = [], 0, 0
        for one in found:
            rows = [row for row in _left(server, one.run) if row["name"] == "value"]
            calls, seconds = one.lost({row["step"]: row["value"] for row in rows})
            assert len(rows) == len({row["step"] for row in rows}), f"{one.run}: a step twice"
            losses.append(seconds)
            worst_calls = max(worst_calls, calls)
            good += seconds <= LOST_S
    losses.sort()
    figures = (
        f"lost: worst {losses[-1] * 1e3:.0f} ms ({worst_calls} calls), p50 {losses[len(losses) // 2] * 1e3:.0f} ms of "
        f"{sum(len(one.logged) for one in found)} calls; 0 twice, no hole before the end"
    )
    name = "agent killed with SIGKILL at random moments: at most the last 200 ms are lost, the rest is delivered later"
    killed = Outcome("A11", name, good, kills, figures)
    name = f"the killed run is shown as lost within {limit_s:.0f} s"
    said = Outcome("A11", name, int(lost_after_s <= limit_s), 1, f"{lost_after_s:.0f} s")
    return [killed, said]


def _left(server: ServerProcess, run: str) -> list[dict[str, Any]]:
    """What the server has of a run; nothing where it was killed before there was anything: how long that took is
    judged."""
    try:
        return server.export(run)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.NOT_FOUND:
            raise
        return []


def forks(folder: Path, *, count: int, say: Say = print) -> list[Outcome]:
    """A14: forks with locks held, by os.fork and by every start method."""
    outcomes = []
    for method in ("os", "fork", "spawn", "forkserver"):
        with IngestServer() as server:
            began = time.monotonic()
            variables = job_environment(folder / method, PERFAGENT_SERVER=server.url)
            good, _ = loops.forks(method, count, variables, within_s=3600.0)
            foreign = any("child" in group.values for frame in server.frames for group in frame.groups)
            whole = server.states()[-1:] == ["finished"] and server.samples("last") == [1.0] and not foreign
        say(f"  {method}: {good}/{count}")
        what = "os.fork" if method == "os" else f"multiprocessing, {method}"
        figures = f"{count - good} hung or failed in {time.monotonic() - began:.0f} s; the parent delivers afterwards: {whole}"
        outcomes.append(
            Outcome("A14", f"{what}, with locks held by four other threads", good if whole else 0, count, figures)
        )
    return outcomes


def damaged_spools(folder: Path, *, rounds: int) -> Outcome:
    """A16: bits flipped, files cut, at seeded random places of every file."""
    seeded = random.Random(16)
    good = sum(loops.survives_damage(folder / str(number), seeded) for number in range(rounds))
    name = "bits flipped and files cut anywhere: the start succeeds, what is whole before the fault is read, nothing invented"
    return Outcome("A16", name, good, rounds, f"{rounds - good} starts failed or read something else")


def starts_at_once(folder: Path, *, rounds: int) -> Outcome:
    """A17: eight processes start at once where twenty dead ones left something."""
    good = 0
    for number in range(rounds):
        with IngestServer() as server:
            good += loops.eight_starts(folder / str(number), server)
    name = "eight processes start at once: what twenty dead ones left is delivered exactly once"
    return Outcome("A17", name, good, rounds, f"{20 * rounds} orphans")


def whole_trainings(folder: Path) -> list[Outcome]:
    """The same training under every fault; one outcome a row."""
    wrong = trainings.run(folder)
    rows: dict[str, list[str]] = {}
    for case in trainings.CASES:
        rows.setdefault(case.row.upper(), []).append(case.name)
    outcomes = []
    for row, names in rows.items():
        good = [name for name in names if not wrong[name]]
        bad = "; ".join(f"{name}: {wrong[name]}" for name in names if wrong[name])
        what = ", ".join(name.partition("-")[2].replace("-", " ") for name in names)
        done = f"training with {what}: losses bit-equal, same exit code, end within 2 s, nothing lost or doubled"
        outcomes.append(Outcome(row, done, len(good), len(names), bad or f"{trainings.STEPS} steps each"))
    return outcomes
