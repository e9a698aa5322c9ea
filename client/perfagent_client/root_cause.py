"""`perfagent profile`, `perfagent stacks` and `perfagent stop`: a running training is asked, waited for, and its answer
shown. RUN: id or name. `perfagent profile --list` and `--show` ask nobody: they show what the run has.

Waited is for as long as somebody can answer: not when the run has ended or is lost, nor for ranks that are. Of a rank
that has not answered a line says why, and the exit code is 1."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from perfagent.command_line.option_types import number_above, whole_number
from perfagent.errors import PerfagentError
from perfagent_client import profiles
from perfagent_client.client import Client
from perfagent_client.commands import output
from perfagent_client.connection import add_options, add_run, print_json, reader
from perfagent_client.connection import found as find
from perfagent_client.polling import ENDED

__all__ = ["profile", "stacks", "stop"]

POLL_S = 0.5


def profile(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Profiles some steps of a running training with torch.profiler; shows what took the time, -o keeps the trace. "
        "Or shows a profile that was taken before, by somebody or by a rule."
    )
    add_run(parser)
    before = parser.add_mutually_exclusive_group()
    before.add_argument("--list", action="store_true", help="the profiles that the run has, and why each was taken")
    before.add_argument("--show", metavar="ID", help="one of these, by its id or the beginning of it")
    parser.add_argument("--steps", type=whole_number(1, 100), default=5, metavar="N", help="1 to 100 (default 5)")
    parser.add_argument(
        "--rank", type=whole_number(0), default=0, metavar="R", help="the rank that is profiled (default 0)"
    )
    parser.add_argument("--shapes", action="store_true", help="record the shapes of operators' inputs")
    parser.add_argument("--memory", action="store_true", help="record allocations")
    parser.add_argument("--python", action="store_true", help="record Python stacks (slow)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the trace here (.json.gz, for ui.perfetto.dev)"
    )
    _waiting(parser, 120.0)
    parser.set_defaults(run=_profile_or_list)


def stacks(parser: argparse.ArgumentParser) -> None:
    parser.description = "Shows what the threads of a running training are doing, ranks at the same place together."
    add_run(parser)
    parser.add_argument(
        "--rank", type=whole_number(0), action="append", metavar="R", help="only this rank; may be given several times"
    )
    parser.add_argument("--all", action="store_true", help="every thread, not only the one that trains")
    _waiting(parser, 30.0)
    parser.set_defaults(run=_stacks)


def stop(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ends a running training after a step that all its ranks agree on, with a checkpoint where perfagent.loop or a "
        "trainer writes any. Its script must have allowed that: attach(stoppable=True), run.should_stop or perfagent.loop."
    )
    add_run(parser, default="")
    _waiting(parser, 120.0)
    parser.set_defaults(run=_stop)


def _stop(arguments: argparse.Namespace) -> int:
    with reader(arguments, asks=True) as client:
        run = find(client, arguments.name_or_id, loosely=False)
        ranks = list(range(run.world_size))
        waited = _settled(client, run.run, client.ask(run.run, "stop"), arguments.wait, ranks)
    _raise_if_refused(waited.order)
    step = waited.order["params"].get("step")
    silent = sorted(set(ranks) - {one["rank"] for one in waited.order["sources"] if one["state"] == "done"})
    if arguments.json:
        print_json({"run": run.run, "step": step, "silent": [waited.of(rank) for rank in silent]})
    elif step is not None:
        print(f"{run.name or run.run} {'stops' if silent else 'stopped'} after step {step:,}")
    for line in waited.lines(silent):
        sys.stderr.write(f"{line}\n")
    return 1 if silent else 0


def _waiting(parser: argparse.ArgumentParser, default: float) -> None:
    told = f"seconds to wait for it (default {default:g})"
    parser.add_argument("--wait", type=number_above(0), default=default, metavar="S", help=told)
    add_options(parser)


def _profile_or_list(arguments: argparse.Namespace) -> int:
    if not arguments.list and arguments.show is None:
        return _profile(arguments)
    with reader(arguments) as client:
        run = find(client, arguments.name_or_id).run
        if arguments.list:
            listed = client.profiles(run)
            if arguments.json:
                print_json({"profiles": listed})
            else:
                profiles.show_list(listed)
            return 0
        found = profiles.find(client, run, arguments.show)
        _save(client, run, found, arguments.output)
    _tell(arguments, found)
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    params: dict[str, Any] = {"steps": arguments.steps}
    params |= {name: True for name in ("shapes", "memory", "python") if getattr(arguments, name)}
    with reader(arguments, asks=True) as client:
        run = find(client, arguments.name_or_id).run
        asked = client.ask(run, "profile", ranks=[arguments.rank], **params)
        waited = _settled(client, run, asked, arguments.wait, [arguments.rank])
        order = waited.order
        _raise_if_refused(order)
        _raise_if_not_done(waited)
        found = next((one for one in client.profiles(run) if one["command"] == order["id"]), None)
        if found is None:
            raise PerfagentError(
                "the profile was taken, but has not arrived; `GET /runs/RUN/profiles` lists it when it has"
            )
        found = client.operators(run, found["id"])
        _save(client, run, found, arguments.output)
    _tell(arguments, found)
    return 0


def _save(client: Client, run: str, found: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        with output(file) as trace:
            for piece in client.trace(run, found["id"]):
                trace.write(piece)


def _tell(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    if arguments.json:
        print_json(found)
        return
    profiles.show(found)
    if arguments.output is not None:
        print(f"\ntrace: {arguments.output} (open it at https://ui.perfetto.dev)")
    elif found["note"]:
        print(f"\nno trace: {found['note']}")


def _stacks(arguments: argparse.Namespace) -> int:
    with reader(arguments, asks=True) as client:
        run = find(client, arguments.name_or_id)
        ranks = arguments.rank or list(range(run.world_size))
        waited = _settled(client, run.run, client.ask(run.run, "stacks", ranks=ranks), arguments.wait, ranks)
        _raise_if_refused(waited.order)
        found = client.stacks(run.run, command=waited.order["id"])
    silent = sorted(set(ranks) - {one["rank"] for one in found["stacks"]})
    if arguments.json:
        print_json({**found, "silent": [waited.of(rank) for rank in silent]} if silent else found)
    else:
        _show(found, every_thread=arguments.all)
    for line in waited.lines(silent):
        sys.stderr.write(f"{line}\n")
    if not found["stacks"]:
        raise PerfagentError(f"no rank has answered: {waited.why}")
    return 1 if silent else 0


def _show(found: dict[str, Any], *, every_thread: bool) -> None:
    for group in found["groups"]:
        print(_ranks(group["ranks"]))
        _frames(group["frames"])
    if every_thread:
        for one in found["stacks"]:
            for thread in one["threads"]:
                waits = f" (waits in {thread['waits_in']})" if "waits_in" in thread else ""
                print(f"rank {one['rank']}, thread {thread['name']}{waits}")
                _frames(thread["frames"])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _frames(frames: list[str]) -> None:
    for frame in frames:
        print(f"    {frame}")
    print()


@dataclass(slots=True)
class _Waited:
    """A command as it stood when nobody waited for it any longer. why: what ended the waiting, where something is
    missing."""

    order: dict[str, Any]
    why: str = "its answer has not arrived"
    timed_out: bool = False

    def of(self, rank: int) -> dict[str, Any]:
        """What the server knows of a rank that was asked; an older one tells nothing."""
        return next((one for one in self.order.get("asked", ()) if one["rank"] == rank), {"rank": rank})

    def lines(self, ranks: list[int]) -> list[str]:
        """Why these ranks have not answered, those of one reason in one line."""
        reasons: dict[str, list[int]] = {}
        for rank in ranks:
            reasons.setdefault(self._reason(self.of(rank)), []).append(rank)
        return [f"{_ranks(those)}: {reason}" for reason, those in reasons.items()]

    def _reason(self, rank: dict[str, Any]) -> str:
        problem = rank.get("problem")
        if problem is None:
            return f"no answer, {self.why}"
        if problem == "no_agent":
            return "no agent: it logs over HTTP"
        if rank["heard"] is None:
            return "never heard"
        if problem == "ended":
            return f"ended ({rank['state']}), last heard at {_clock(rank['heard'])}"
        if problem:
            return f"not heard since {_clock(rank['heard'])}"
        return f"no answer, {self.why}; last heard at {_clock(rank['heard'])}"


def _clock(text: str) -> str:
    """An RFC 3339 time as a clock on the wall here shows it; with the day, unless that is today."""
    at = datetime.fromisoformat(text).astimezone()
    return at.strftime("%H:%M" if at.date() == datetime.now(at.tzinfo).date() else "%Y-%m-%d %H:%M")


def _settled(client: Client, run: str, order: dict[str, Any], wait_s: float, ranks: list[int]) -> _Waited:
    """The command once these ranks have answered for good, a stop is refused, nobody is left to answer, or the time is over."""
    end = time.monotonic() + wait_s
    while True:
        state = client.run(run).state  # before the answers: what was said before the end is with them
        latest = next((one for one in client.commands(run) if one["id"] == order["id"]), order)
        missing = set(ranks) - {one["rank"] for one in latest["sources"] if one["state"] in ("done", "refused")}
        # a stop that one rank refuses happens nowhere, and reaches no other where that is rank 0
        if not missing or (order["kind"] == "stop" and latest["state"] == "refused"):
            return _Waited(latest)
        # one that has accepted works on it, and answers when the network is back
        accepted = missing & {one["rank"] for one in latest["sources"] if one["state"] == "accepted"}
        accepted -= {one["rank"] for one in latest.get("asked", ()) if one["problem"] == "ended"}
        if state in ENDED and not (state == "lost" and accepted):
            return _Waited(latest, _why_nobody_answers(state))
        able = [one for one in latest.get("asked", ()) if one["rank"] in missing and not one["problem"]]
        if "asked" in latest and not able and not accepted:
            return _Waited(latest, _why_nobody_answers(client.run(run).state))  # it may have ended since it was read
        if time.monotonic() > end:
            return _Waited(latest, f"within {wait_s:g} s", timed_out=True)
        time.sleep(POLL_S)


def _why_nobody_answers(state: str) -> str:
    if state == "lost":
        return "the run is lost"
    return f"the run has ended ({state})" if state in ENDED else "nobody who could answer is left"


def _raise_if_refused(order: dict[str, Any]) -> None:
    if order["state"] == "refused":
        said = next((one["message"] for one in order["sources"] if one["state"] == "refused"), "")
        raise PerfagentError(f"refused: {said}")


def _raise_if_not_done(waited: _Waited) -> None:
    """Of a profile."""
    state = waited.order["state"]
    if state == "done":
        return
    if waited.timed_out:
        raise PerfagentError(f"it is not done yet (now: {state}); it goes on, wait longer with --wait")
    silent = "; ".join(waited.lines(waited.order["ranks"]))
    raise PerfagentError(f"the profile was not taken, {waited.why}: {silent}")
