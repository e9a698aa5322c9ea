"""What we promise about `--json`: docs/reference/commands.md states it for each command, and so it is."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_builders import ADMIN_TOKEN, Listening, frame, listening
from builders import Receiver, until, web
from command_line import commands, subcommands
from commands import perfagent
from frames import state
from json_shapes import differences, shapes, whole

from perfagent.wire import Alert, Finding, Quantiles, RunSummary, Spent, StepWindow, Timing
from perfagent_loop.search.tuning import Setting, TuningStep
from perfagent_server.routes.users import UserShown
from perfagent_server.store.artifacts import StoredProfile
from perfagent_tools.bench.command import BENCHMARKS
from perfagent_tools.bench.report import Figure, Report

Run = Callable[..., Any]


def with_json(parser: argparse.ArgumentParser) -> Iterator[str]:
    if "--json" in parser._option_string_actions:
        yield parser.prog.removeprefix("perfagent ")
    for one in subcommands(parser).values():
        yield from with_json(one)


def test_each_command_with_json_is_stated_and_no_other() -> None:
    benches = {f"bench {name}" for name in (*BENCHMARKS, "ingest")}
    stated = {name for name in shapes() if name[0].islower()}
    found = {name for parser in commands().values() for name in with_json(parser)}
    assert (found - benches) | {"bench NAME"} == stated


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Run", RunSummary), ("Finding", Finding), ("Alert", Alert), ("Timing", Timing), ("Quantiles", Quantiles),
        ("Window", StepWindow), ("Spent", Spent), ("User", UserShown), ("bench NAME", Report),
    ],
)  # fmt: skip
def test_shapes_have_the_fields_of_their_dataclasses(name: str, kind: Any) -> None:
    assert {*whole(shapes()[name])} == fields_of(kind)


def fields_of(kind: Any) -> set[str]:
    return {one.name for one in dataclasses.fields(kind)}


def test_parts_of_long_commands_have_their_fields() -> None:
    assert {*shapes()["profile"]} == fields_of(StoredProfile)
    assert {*shapes()["bench NAME"]["figures"]["*"]} == fields_of(Figure)
    assert {*shapes()["tune"]["setting"]} == fields_of(Setting)
    assert {*shapes()["tune"]["steps"][0]} == fields_of(TuningStep) | {"gain_pct"}


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ({}, {"a": "text"}), ({"a": 1}, {"a": "text"}), ({"a": "x", "b": 1}, {"a": "text"}), ({"a": None}, {"a": "time"}),
        ([1.5], ["whole"]), (True, "number"), ({"x": "y"}, {"*": "bool"}), ({"rule": "x"}, "Finding"), ([], {"a?": "any"}),
    ],
)  # fmt: skip
def test_what_is_not_as_stated_is_seen(value: Any, shape: Any) -> None:
    assert [*differences(value, shape)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Listening, str]]:
    with (
        Receiver() as receiver,
        listening(tmp_path_factory.mktemp("server"), webhook_allow=(receiver.address,)) as running,
    ):
        for name in ("before", "after", "gone"):
            step = np.arange(1, 121)
            times = 0.25 * np.exp(np.random.default_rng(3).normal(0, 0.03, 120))
            losses = (1 + 2 / step).tolist()
            if name == "before":
                losses[-1] = float("nan")
            values = {"loss": losses, "step_time_s": times.tolist(), "phase/data_s": (times / 10).tolist()}
            config = {"workers": 0 if name == "before" else 8}
            events = [state("starting", name=name, config=config), state("finished", step=120)]
            running.take(frame(values, run=name, name=name, events=events))
        until(lambda: web().get(f"{running.url}/api/v1/alerts").json()["alerts"], why="no alert")
        yield running, receiver.url


@pytest.fixture
def run(server: tuple[Listening, str], tmp_path: Path) -> Run:
    """Runs a command with --json, and compares what it prints with what is stated."""
    where = {"PERFAGENT_SERVER": server[0].url, "PERFAGENT_ADMIN_TOKEN": ADMIN_TOKEN}

    def do(*words: str, stated: Any = None, codes: tuple[int, ...] = (0,)) -> Any:
        ended = perfagent(tmp_path, *words, "--json", **where)
        assert ended.returncode in codes, (words, ended.stderr)
        printed = json.loads(ended.stdout)
        name = next(name for name in (" ".join(words[:2]), words[0]) if name in shapes())
        assert [*differences(printed, shapes()[name] if stated is None else stated)] == [], words
        return printed

    return do


@pytest.mark.real
def test_reading_commands_print_what_is_stated(run: Run, tmp_path: Path) -> None:
    run("runs")
    run("show", "before")
    run("compare", "before", "after")
    run("wait", "before", codes=(3,))
    run("wait", "after")
    run("delete", "gone", "--yes")
    run("profile", "before", "--list", stated={"profiles": [shapes()["profile"]]})
    (tmp_path / "curve.csv").write_text("step,loss\n1,2\n2,nan\n")
    [judged] = run("diagnose", str(tmp_path / "curve.csv"), codes=(1,))["runs"]
    assert judged["findings"]


@pytest.mark.real
def test_commands_about_alerts_print_what_is_stated(run: Run) -> None:
    alert = run("alerts", "list")["alerts"][0]["id"]
    run("alerts", "show", alert)
    for act in ("ack", "unack", "mute", "unmute", "snooze", "unsnooze", "resolve"):
        run("alerts", act, alert)
    run("alerts", "add", "mine", "--metric", "loss", "--above", "5", "--for", "1step")
    run("alerts", "rules")
    run("alerts", "remove", "mine")
    silence = run("silences", "add", "--for-s", "60", "--run", "after")
    run("silences", "list")
    run("silences", "remove", silence["id"])


@pytest.mark.real
def test_commands_about_the_server_print_what_is_stated(run: Run, server: tuple[Listening, str]) -> None:
    channel = run("channels", "add", "webhook", server[1])["id"]
    run("channels", "list")
    for act in ("test", "log", "rotate", "remove"):
        run("channels", act, channel)
    run("prices", "set", "--currency", "EUR", "--gpu-hour", "2")
    run("prices", "list")
    run("prices", "remove")
    run("retention", "set", "--runs-days", "100")
    for act in ("list", "preview", "remove"):
        run("retention", act)
    key = run("keys", "create", "read")["id"]
    run("keys", "list")
    run("keys", "limit", key, "requests_per_s=100")
    run("keys", "revoke", key)
    run("keys", "login")


@pytest.mark.real
def test_commands_about_this_machine_print_what_is_stated(run: Run) -> None:
    run("estimate", "--demo")
    run("doctor", codes=(0, 1))  # as the machine is
