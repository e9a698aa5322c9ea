"""`perfagent profile` and `perfagent stacks`: a running training is asked, waited for, and its answer shown. RUN: id or name."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from perfagent.errors import PerfagentError
from perfagent_client.client import Client
from perfagent_client.commands import add_options, output, print_json

__all__ = ["profile", "stacks"]

POLL_S = 0.5
SHOWN = 15


def profile(parser: argparse.ArgumentParser) -> None:
    parser.description = "Profiles some steps of a running training with torch.profiler; shows its operators, -o keeps its trace."
    parser.add_argument("name_or_id", metavar="RUN")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="1 to 100 (default 5)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank that is profiled (default 0)")
    parser.add_argument("--shapes", action="store_true", help="record the shapes of operators' inputs")
    parser.add_argument("--memory", action="store_true", help="record allocations")
    parser.add_argument("--python", action="store_true", help="record Python stacks: dear")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the trace here (.json.gz, for ui.perfetto.dev)")
    _waiting(parser, 120.0)
    parser.set_defaults(run=_profile)


def stacks(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows what the threads of a running training are doing, ranks at the same place together."
    parser.add_argument("name_or_id", metavar="RUN")
    parser.add_argument("--rank", type=int, action="append", metavar="R", help="only this rank; may be given several times")
    parser.add_argument("--all", action="store_true", help="every thread, not only the one that trains")
    _waiting(parser, 30.0)
    parser.set_defaults(run=_stacks)


def _waiting(parser: argparse.ArgumentParser, default: float) -> None:
    parser.add_argument("--wait", type=float, default=default, metavar="S", help=f"seconds to wait for it (default {default:g})")
    add_options(parser)


def _profile(arguments: argparse.Namespace) -> int:
    params: dict[str, Any] = {"steps": arguments.steps}
    params |= {name: True for name in ("shapes", "memory", "python") if getattr(arguments, name)}
    with Client(arguments.server) as client:
        run = client.find(arguments.name_or_id).run
        order = _settled(client, run, client.ask(run, "profile", ranks=[arguments.rank], **params), arguments.wait)
        _raise_if_refused(order)
        found = next((one for one in client.profiles(run) if one["command"] == order["id"]), None)
        if found is None:
            raise PerfagentError("the profile was taken, but has not arrived; `GET /runs/RUN/profiles` lists it when it has")
        found = client.operators(run, found["id"])
        if arguments.output is not None:
            with output(arguments.output) as file:
                for piece in client.trace(run, found["id"]):
                    file.write(piece)
    if arguments.json:
        print_json(found)
    else:
        _table(found)
        if arguments.output is not None:
            print(f"\ntrace: {arguments.output} (open it at https://ui.perfetto.dev)")
        elif found["note"]:
            print(f"\nno trace: {found['note']}")
    return 0


def _table(found: dict[str, Any]) -> None:
    steps = f"steps {found['first_step']} to {found['last_step']}, {found['duration_s']:.3g} s"
    idle = found["gaps"].get("idle_pct")
    what = {"device": "the device idle", "operators": "outside of operators"}.get(found["gaps"].get("of", ""), "idle")
    print(f"rank {found['rank']}, {steps}" + (f", {what} {idle:.0f} % of the time" if idle is not None else ""))
    device = any("self_device_s" in row for row in found["operators"])
    head = ["OPERATOR", "CALLS", "SELF CPU ms", "TOTAL CPU ms", *(("SELF GPU ms", "TOTAL GPU ms") if device else ())]
    names = ["self_cpu_s", "total_cpu_s", *(("self_device_s", "total_device_s") if device else ())]
    rows = [
        [row["name"][:50], str(row["calls"]), *(f"{1000 * row.get(name, 0.0):.3f}" for name in names)]
        for row in found["operators"][:SHOWN]
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells))


def _stacks(arguments: argparse.Namespace) -> int:
    with Client(arguments.server) as client:
        run = client.find(arguments.name_or_id)
        ranks = arguments.rank or list(range(run.world_size))
        asked = client.ask(run.run, "stacks", ranks=ranks)
        order = _settled(client, run.run, asked, arguments.wait, answers=len(ranks))
        _raise_if_refused(order)
        found = client.stacks(run.run, command=order["id"])
    if arguments.json:
        print_json(found)
        return 0
    if not found["stacks"]:
        raise PerfagentError(f"no rank has answered within {arguments.wait:g} s: is the process alive, and its agent connected?")
    for group in found["groups"]:
        print(f"rank{'s' if len(group['ranks']) > 1 else ''} {', '.join(map(str, group['ranks']))}")
        _frames(group["frames"])
    if arguments.all:
        for one in found["stacks"]:
            for thread in one["threads"]:
                waits = f" (waits in {thread['waits_in']})" if "waits_in" in thread else ""
                print(f"rank {one['rank']}, thread {thread['name']}{waits}")
                _frames(thread["frames"])
    silent = sorted(set(ranks) - {one["rank"] for one in found["stacks"]})
    if silent:
        sys.stderr.write(f"no answer from rank {', '.join(map(str, silent))}\n")
    return 0


def _frames(frames: list[str]) -> None:
    for frame in frames:
        print(f"    {frame}")
    print()


def _settled(client: Client, run: str, order: dict[str, Any], wait_s: float, *, answers: int = 1) -> dict[str, Any]:
    """The command once so many processes have answered for good, or as it stands when the time is over."""
    end = time.monotonic() + wait_s
    while True:
        latest = next((one for one in client.commands(run) if one["id"] == order["id"]), order)
        done = [one for one in latest["sources"] if one["state"] in ("done", "refused")]
        if len(done) >= answers or time.monotonic() > end:
            return latest
        time.sleep(POLL_S)


def _raise_if_refused(order: dict[str, Any]) -> None:
    if order["state"] == "refused":
        said = next((one["message"] for one in order["sources"] if one["state"] == "refused"), "")
        raise PerfagentError(f"refused: {said}")
    if order["kind"] == "profile" and order["state"] != "done":
        raise PerfagentError(f"it is not done yet (now: {order['state']}); it goes on, wait longer with --wait")
