"""The options of `perfagent bench ingest`, and what it says: acknowledgements, what was lost, and the server's cost."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from perfagent import __version__
from perfagent.command_line.option_types import number_above, positive
from perfagent.command_line.processor import processor
from perfagent.errors import ConfigError, ResourceError, ServerUnreachable
from perfagent_server.ingest_benchmark.agents import NAMES, Load, Seen, play
from perfagent_server.ingest_benchmark.own_server import OwnServer, own_server

__all__ = ["add_options", "measure"]

_WARM_S = 5.0  # runs begin, and the server's caches fill


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures how many agents a server serves: simulated ones send real frames over HTTP, each a run of its own, and "
        "all that was acknowledged is read back at the end. Without --url it starts a server of its own."
    )
    parser.add_argument("--agents", type=positive, default=100, metavar="N", help="agents (default 100)")
    parser.add_argument("--seconds", type=number_above(0), default=30.0, metavar="S", help="to measure (default 30)")
    parser.add_argument(
        "--period", type=number_above(0), default=1.0, metavar="S", help="from frame to frame of an agent (default 1)"
    )
    parser.add_argument("--processes", type=positive, default=1, metavar="N", help="that play the agents (default 1)")
    parser.add_argument("--url", help="a server that runs; its runs of project `bench` stay there")
    parser.add_argument(
        "--key", help="an API key of that server: ingest sends, admin also reads back (default: PERFAGENT_API_KEY)"
    )
    parser.add_argument(
        "--database", metavar="URL", help="of the server that is started, as `perfagent up --database` takes it"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.url and arguments.database:
        raise ConfigError("--database is for the server that the benchmark starts; leave out --url or --database")
    if arguments.url and urlsplit(arguments.url).scheme not in ("http", "https"):
        raise ConfigError(f"--url is {arguments.url!r}; it must begin with http:// or https://")
    with contextlib.ExitStack() as stack:
        server = None if arguments.url else stack.enter_context(own_server(arguments.database))
        found = measure(
            server.url if server else arguments.url.rstrip("/"),
            key=arguments.key or (None if server else os.environ.get("PERFAGENT_API_KEY")),
            agents=arguments.agents,
            seconds=arguments.seconds,
            period_s=arguments.period,
            processes=min(arguments.processes, arguments.agents),
            server=server,
        )
    print(json.dumps(found, indent=2) if arguments.json else _text(found))
    return 1 if found["lost"] or found["problem"] else 0


def measure(
    url: str,
    *,
    key: str | None = None,
    agents: int,
    seconds: float,
    period_s: float,
    processes: int = 1,
    server: OwnServer | None = None,
) -> dict[str, Any]:
    """What `--json` prints. Times in ms, memory in bytes; None for what cannot be known. Raises ServerUnreachable."""
    with httpx.Client(
        base_url=f"{url}/api/v1",
        headers={"Authorization": f"Bearer {key}"} if key else {},
        trust_env=False,
        timeout=60.0,
    ) as http:
        _greet(http, url)
        tag = secrets.token_hex(3)
        with _started(processes) as pool:
            begin = time.monotonic() + min(_WARM_S, seconds)
            loads = [
                Load(
                    url=url, key=key, tag=tag, first=first, agents=count, period_s=period_s, begin=begin, end=begin + seconds,
                )
                for first, count in _shares(agents, processes)
            ]  # fmt: skip
            seen, cpu_s = _played(pool, loads, server)
        lost = _lost(http, seen)
    took = {name: _milliseconds(values) for name, values in (("ack_ms", seen.acks), ("late_ms", seen.late))}
    frames = len(seen.acks)
    return {
        "version": __version__,
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "agents": agents,
        "period_s": period_s,
        "seconds": seconds,
        "series": len(NAMES),
        "frames": frames,
        "acks_per_s": round(frames / seconds, 1),
        **took,
        "acknowledged": sum(seen.steps.values()),
        "lost": lost,
        "refused": seen.refused,
        "lost_connections": seen.lost_connections,
        "problem": seen.problem,
        "server": None
        if server is None or cpu_s is None
        else {
            "cpu_cores": round(cpu_s / seconds, 3),
            "cpu_us_per_frame": round(1e6 * cpu_s / max(frames, 1)),
            "peak_rss_bytes": server.peak_rss_bytes,
        },
    }


def _greet(http: httpx.Client, url: str) -> None:
    try:
        answer = http.get("/session")
    except httpx.HTTPError as error:
        raise ServerUnreachable(
            f"{url} does not answer ({type(error).__name__}: {error}); is `perfagent up` there?"
        ) from error
    if answer.status_code != 200:
        raise ResourceError(f"{url} answered {answer.status_code} {answer.text[:200]!r}; give a valid --key")


def _shares(agents: int, processes: int) -> list[tuple[int, int]]:
    """(first agent, how many) of each process."""
    bounds = [agents * number // processes for number in range(processes + 1)]
    return [(low, high - low) for low, high in itertools.pairwise(bounds)]


@contextlib.contextmanager
def _started(processes: int) -> Iterator[Executor]:
    """Processes that have started and imported the agents, so that this takes no time of the measurement."""
    context = get_context("spawn")
    all_there = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, initializer=all_there.wait) as pool:
        for imported in [pool.submit(Seen) for _ in range(processes)]:
            imported.result()
        yield pool


def _played(pool: Executor, loads: Sequence[Load], server: OwnServer | None) -> tuple[Seen, float | None]:
    """What all agents saw, and the CPU seconds of the server from the begin to the end of the measurement."""
    seen, cpu_s = Seen(), None
    playing = [pool.submit(play, load) for load in loads]
    if server is not None:
        time.sleep(max(0.0, loads[0].begin - time.monotonic()))
        before = server.cpu_s()
        time.sleep(max(0.0, loads[0].end - time.monotonic()))
        cpu_s = server.cpu_s() - before
    for one in playing:
        seen.add(one.result())
    return seen, cpu_s


def _lost(http: httpx.Client, seen: Seen) -> int | None:
    """Frames that were acknowledged and are not there; None where the key may not read."""
    lost = 0
    for run, steps in seen.steps.items():
        answer = http.get(f"/runs/{quote(run)}/series", params={"name": "loss", "points": 1})
        if answer.status_code in (401, 403):
            return None
        lost += abs(steps - (sum(answer.json()["count"]) if answer.status_code == 200 else 0))
    return lost


def _milliseconds(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
        for name, share in places.items()
    }


def _text(found: dict[str, Any]) -> str:
    acks, late, server = found["ack_ms"], found["late_ms"], found["server"]
    lines = [
        f"perfagent {found['version']} on {found['machine']}",
        f"{found['agents']} agents, a frame of {found['series']} series every {found['period_s']:g} s, {found['seconds']:g} s",
        "",
        f"  acknowledged   {found['acks_per_s']:.1f} frames/s of {found['agents'] / found['period_s']:.1f} that were due",
    ]
    if acks:
        lines += [
            f"  ack            p50 {acks['p50']:.1f} ms   p90 {acks['p90']:.1f}   p99 {acks['p99']:.1f}   max {acks['max']:.1f}",
            f"  sent late by   p50 {late['p50']:.1f} ms   p99 {late['p99']:.1f}   (large: this machine is busy)",
        ]
    checked = "not checked: the key may not read" if found["lost"] is None else f"{found['lost']}"
    lines.append(f"  lost           {checked} of {found['acknowledged']} frames that were acknowledged")
    if found["refused"] or found["lost_connections"]:
        lines.append(f"  sent again     {found['refused']} refusals, {found['lost_connections']} lost connections")
    if server:
        lines.append(
            f"  server         {server['cpu_cores']:.2f} cores, {server['cpu_us_per_frame']} µs CPU a frame, at most "
            f"{server['peak_rss_bytes'] / 1e6:.0f} MB"
        )
    if found["problem"]:
        lines.append(f"  problem        {found['problem']}")
    return "\n".join(lines)
