"""perfagent show: one page of a real training that met a NaN in its data, and of runs larger than any page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from api_builders import Listening, frame, listening
from builders import job_environment, sync, until
from command_line import command, in_terminal

from perfagent.command_line.terminal_output import Screen, Table
from perfagent.wire import Event, Finding, Latest, Quantiles, Series, Timing, encode
from perfagent_client import Client
from perfagent_client.models import RunDetails
from perfagent_client.page import fitted, flat
from perfagent_client.run_sections import Facts, sections
from perfagent_client.spent import paused_s
from perfagent_client.watch.run_text import head_lines
from perfagent_client.watch.run_view import RunView

TRAINING = """
import torch, perfagent
torch.manual_seed(0)
model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(32, 32), torch.nn.ReLU())], torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
perfagent.attach(model, optimizer, name="nan job", project="tests", config={"lr": 1e-3, "hidden": 32})
inputs = torch.randn(40 * 16, 32)
inputs[30 * 16 + 3, 5] = float("nan")
for step in range(40):
    batch = inputs[16 * step : 16 * step + 16]
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    perfagent.log({"accuracy": step / 100})
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    folder = tmp_path_factory.mktemp("show")
    with listening(folder) as running:
        environment = job_environment(folder, PERFAGENT_SERVER=running.url)
        subprocess.run([sys.executable, "-c", TRAINING], env=environment, check=True, timeout=150, cwd=folder)
        sync(environment)
        with Client(running.url) as client:
            [ended] = until(lambda: list(client.runs(name="nan job", state="finished")), why="the run did not end")
            run = ended.run
            until(
                lambda: client.findings(run) and client.findings(run)[0].evidence.get("causes"),
                why="no cause was found",
            )
        yield running


@pytest.fixture(autouse=True)
def its_address(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_SERVER", server.url)


def test_the_page_of_a_nan_has_its_evidence_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    shown = command(capsys, "show", "nan job")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert len(lines) <= 60
    [verdict] = [line for line in lines if line.startswith("[critical] nonfinite_loss: ")]
    assert "in step 31" in verdict and "'batch'" in verdict
    assert [line for line in lines if line.strip().startswith("Fix: Look at the samples of that batch")]
    [fingerprint] = [line for line in lines if line.strip().startswith("batch of step 31: fingerprint ")]
    assert "local variables of" in fingerprint
    assert [line for line in lines if line.strip().startswith("batch float32[16, 32]: 1 non-finite, range NaN to NaN")]
    text = " ".join(shown.out.split())
    for part in (
        "loss NaN in step 40 (newest)", "10 values not finite", "samples/s", "whole step 100.0 %", "iB of ", "Process memory",
        "Parameter memory 16.6 KiB", "accuracy 0.39 (step 40)", "of the script: lr 0.001, hidden 32",
    ):  # fmt: skip
        assert part in text, part
    # What the page has room for depends on what else there was to say.
    assert "optimizer: AdamW, lr 0.001" in " ".join(command(capsys, "show", "nan job", "--all").out.split())
    assert "e+" not in shown.out, "a raw figure"
    assert "grad_norm/" not in shown.out, "layers are for --all"


def test_all_adds_every_layer_and_the_raw_values(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in command(capsys, "show", "nan job", "--all").out.splitlines()]
    layers = [
        line[0]
        for line in lines[lines.index(["LAYERS", "(newest)"]) : lines.index(["RAW", "VALUES", "(newest)"])]
        if line
    ]
    assert {"0.weight", "8.bias"} <= set(layers)
    assert layers.index("0.weight") < layers.index("2.weight") < layers.index("8.weight")
    raw = {line[0]: line[1:] for line in lines[lines.index(["RAW", "VALUES", "(newest)"]) :] if line}
    assert raw["accuracy"] == ["0.39", "40", "0"]
    assert raw["memory/parameters_bytes"][1] == "B"


def test_the_time_between_two_attempts_is_no_training(
    server: Listening, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A script that ended is started again twenty minutes later, and goes on."""
    with Client(server.url) as client:
        for attempt, first in ((1, 1), (2, 1231)):
            begin = 1_700_000_000.0 + first
            told = [(begin, first - 1, {"state": "running"}), (begin + 29, first + 29, {"state": "finished"})]
            events = [Event(kind="state", time=time, step=step, data=data) for time, step, data in told]
            made = frame(
                {"loss": [1.0] * 30}, run="again", name="again", first_step=first, attempt=attempt, events=events
            )
            headers = {"Content-Type": "application/x-msgpack"}
            client.http.post(f"{server.url}/api/v1/ingest", content=encode(made), headers=headers).raise_for_status()
        run = until(lambda: (found := client.run("again")).ended and found)
    assert "took 58 s" in command(capsys, "show", "again").out
    assert command(capsys, "report", "again", "-o", str(tmp_path / "report.html")).code == 0
    assert "took 58 s" in (tmp_path / "report.html").read_text()
    assert "took 58 s" in str(head_lines(RunView(run), 200, 2e9)[1])
    assert paused_s(run) == pytest.approx(1201)  # the page's clock leaves it out


def test_json_keeps_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(command(capsys, "show", "nan job", "--json").out)
    keys = {
        "run",
        "project",
        "name",
        "state",
        "step",
        "verdict",
        "findings",
        "latest",
        "timing",
        "alerts",
        "config",
        "meta",
    }
    assert keys <= shown.keys()
    assert shown["latest"]["loss"] == "NaN" and isinstance(shown["latest"]["accuracy"], float)
    assert shown["verdict"]["evidence"]["causes"][0]["batch"]["tensors"][0]["nonfinite"] == 1


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_of_eighty_columns_holds_the_page(server: Listening, tmp_path: Path, rich: bool) -> None:
    environment = {**os.environ, "PERFAGENT_SERVER": server.url}
    shown = in_terminal(["show", "nan job"], environment, rich=rich)
    assert shown.code == 0, shown.text
    lines = shown.text.rstrip().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) < 80
    assert ("\x1b[1;31m[critical] nonfinite_loss" in shown.sent) is rich
    assert ("\x1b" in shown.sent) is rich
    assert "whole step" in shown.text and "fingerprint" in shown.text


def test_the_time_in_the_verdict_is_that_of_the_table_and_names_its_window(
    server: Listening, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 40
    values = {"loss": [1.0 / step for step in range(1, steps + 1)], "step_time_s": [0.1] * steps}
    with Client(server.url) as client:
        headers = {"Content-Type": "application/x-msgpack"}
        body = encode(frame(values, run="fine", name="fine"))
        client.http.post(f"{server.url}/api/v1/ingest", content=body, headers=headers).raise_for_status()
    until(lambda: "ms a step" in command(capsys, "show", "fine").out)
    text = " ".join(command(capsys, "show", "fine").out.split())
    assert "100 ms a step (median of the newest 40 steps)" in text
    assert "the newest 40 steps share median mean p90 p99 newest whole step 100.0 % 100 ms" in text


def test_shares_of_several_ranks_name_their_steps_and_rank(
    server: Listening, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rule looks at the newest steps of one rank, the verdict at all steps of another, the table at all ranks."""
    steps, headers = 60, {"Content-Type": "application/x-msgpack"}
    begins = Event(kind="state", time=1_700_000_000.0, data={"state": "starting", "world_size": 2})
    with Client(server.url) as client:
        for rank, waits in ((0, [0.03] * 30 + [0.06] * 30), (1, [0.05] * steps)):
            values = {"step_time_s": [0.1] * steps, "phase/comm_s": waits, "phase/forward_s": [0.04] * steps}
            body = encode(frame(values, run="two ranks", name="two ranks", rank=rank, events=[begins]))
            client.http.post(f"{server.url}/api/v1/ingest", content=body, headers=headers).raise_for_status()
    until(lambda: "comm_bound" in command(capsys, "show", "two ranks").out)
    text = " ".join(command(capsys, "show", "two ranks").out.split())
    assert "50 ms of 100 ms (50 %)" in text and "newest 20 steps on the rank that waits least" in text
    assert "of the whole run on rank 0: communication 45 %" in text and "training 40 %" in text
    assert "mean of the 2 ranks" in text


def huge() -> Facts:
    """More of everything than any page holds."""
    names = [f"grad_norm/layers.{layer}.weight" for layer in range(300)] + [f"metric/{number}" for number in range(500)]
    names += [f"node_gpu{gpu}/utilization_pct" for gpu in range(16)]
    names += ["gpu/utilization_pct", "gpu/xid", "host/cpu_pct", "loss", "lr"]
    words = "word " * 400
    findings = [
        Finding(rule=f"rule_{number}", severity="warning", message=words, fix=words, since_step=3, ranks=list(range(4000)),
                evidence={"traceback": f"{words}\n" * 90, "losses": [1.0] * 900, **{f"k{n}": words for n in range(90)}})
        for number in range(30)
    ]  # fmt: skip
    run = RunDetails(
        run="r1", project="p", name=words, state="failed", step=10**9, reason=words,
        started="2026-01-01T00:00:00Z", updated="2026-02-01T00:00:00Z",
        world_size=4096, config={f"group{g}": {f"k{n}": words for n in range(30)} for g in range(60)},
        notes=words * 9,
        meta={"command": ["python"] * 900, "torch": "2"},
    )  # fmt: skip
    quantiles = Quantiles(p50=1e-7, p90=1.0, p99=9e6, mean=2.0, count=9)
    series = dict.fromkeys(("step_time_s", *(f"phase/own{number}_s" for number in range(90))), quantiles)
    losses = Series(name="loss", rank="all", unit="", exact=False, step=list(range(48)), min=[1e300] * 48, max=[1e300] * 48,
                    mean=[float("nan")] * 48, count=[9] * 48, nonfinite=[10**6] * 48)  # fmt: skip
    return Facts(
        run, findings[0], findings, {name: Latest(value=1e300, step=10**9, time=0.0, rank=0) for name in names},
        Timing(from_step=1, to_step=10**9, series=series, shares={}), losses, "http://127.0.0.1:8420/run/r1",
    )  # fmt: skip


@pytest.mark.parametrize("most", [60, 30, 12])
@pytest.mark.parametrize("width", [None, 200, 80, 40])
def test_no_run_is_too_large_for_the_page(most: int, width: int | None) -> None:
    screen = Screen()
    screen.width = width
    page = flat(fitted(sections(huge(), screen.wrapped), most))
    assert sum(len(part) if isinstance(part, Table) else 1 for part in page) <= most
    texts = [part.text for part in page if not isinstance(part, Table)]
    assert any("--all" in text for text in texts)
    if most == 60:
        assert {"VERDICT", "PROGRESS", "WHERE A STEP GOES"} <= set(texts)


def test_a_run_that_says_nothing_has_a_page_too() -> None:
    facts = huge()
    empty = replace_run(facts.run)
    bare = Facts(empty, Finding(rule="healthy", severity="info", message="Nothing to judge yet."), [], {}, Timing(
        from_step=0, to_step=0, series={}, shares={}))  # fmt: skip
    lines = flat(fitted(sections(bare, Screen().wrapped), 60))
    assert [line.text for line in lines if not isinstance(line, Table)][:2] == ["empty  (p, r2)", "starting, step 0"]


def test_a_short_page_keeps_the_settings_that_are_looked_at_first() -> None:
    """The order in which the agent found them decides nothing: the optimizer and the model come before the library's."""
    found = {
        "techniques": {"adapters": {"library": "peft"}}, "deepspeed": {"zero_stage": 2}, "huggingface": {"bf16": True},
        "model": {"class": "GPT", "parameters": 83_000}, "optimizer": {"class": "AdamW", "lr": 0.125},
    }  # fmt: skip
    facts = huge()
    facts = replace(facts, run=replace(facts.run, config=found), findings=facts.findings[:1])
    lines = [part.text for part in flat(fitted(sections(facts, Screen().wrapped), 60)) if not isinstance(part, Table)]
    shown = lines[lines.index("CONFIGURATION") + 1 :]
    assert "AdamW" in shown[0] and "0.125" in shown[0]
    assert "GPT" in shown[1]
    assert "bf16" in shown[2]
    assert "--all" in shown[3]


def replace_run(run: RunDetails) -> RunDetails:
    return replace(
        run, run="r2", name="empty", state="starting", step=0, reason="", config={}, meta={}, notes="", world_size=1
    )


# ------------------------------------------------------------------------------------------------------------------- --


def story(server: Listening, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that trains 6 steps, one each time somebody has seen the one before, and then ends."""

    def send(step: int, events: tuple[Event, ...] = ()) -> None:
        with Client(server.url) as client:
            values = {"loss": [1.0 / step], "step_time_s": [0.02]}
            body = encode(frame(values, run=run, name=run, seq=step, first_step=step, events=events))
            headers = {"Content-Type": "application/x-msgpack"}
            client.http.post(f"{server.url}/api/v1/ingest", content=body, headers=headers).raise_for_status()

    runs = server.app.state.services.runs
    end = Event(kind="state", step=6, time=1.8e9, data={"state": "finished"})
    steps, get = iter(range(2, 7)), runs.get

    def seen(identifier: str) -> object:
        shown = get(identifier)
        if identifier == run and (step := next(steps, None)):
            send(step, (end,) if step == 6 else ())
        return shown

    send(1)
    monkeypatch.setattr(runs, "get", seen)


def test_follow_prints_a_line_for_what_is_new_and_ends_with_the_run(
    server: Listening, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story(server, "followed", monkeypatch)
    shown = command(capsys, "show", "followed", "--follow")
    assert shown.code == 0
    updates = [line for line in shown.out.splitlines() if "  step " in line and "a step (median of " in line]
    assert len(updates) >= 2
    assert (
        "running  step" in updates[0]
        and "finished  step 6  loss 0.166667  20 ms a step (median of the whole run)  healthy" in updates[-1]
    )
    assert "finished, step 6" in shown.out, "the page at the end"


def test_follow_redraws_the_page_on_a_terminal(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    story(server, "drawn", monkeypatch)
    shown = in_terminal(["show", "drawn", "--follow"], {**os.environ, "PERFAGENT_SERVER": server.url}, rows=24)
    assert shown.code == 0, shown.text
    assert shown.text.count("drawn  (p, drawn)") >= 3, "drawn again and again"
    assert "\x1b[2K" in shown.sent or "\x1b[1A" in shown.sent, "over what was there"
    assert "finished, step 6" in shown.text


def test_what_the_agent_costs_is_never_below_zero_and_no_gpu_means_no_figure_of_one() -> None:
    values = {"agent/overhead_pct": -4.31, "sync/calls_per_step": 5.0, "host/cpu_pct": 50.0}
    newest = {name: Latest(value=value, step=9, time=1.0, rank=0) for name, value in values.items()}
    facts = huge()
    shown = Facts(
        replace_run(facts.run), facts.verdict, [], newest, Timing(from_step=0, to_step=0, series={}, shares={})
    )
    lines = flat(fitted(sections(shown, Screen().wrapped), 60))
    text = "\n".join(line.text for line in lines if not isinstance(line, Table))
    assert "Agent overhead < 0.1 %" in text and "Synchronizing" not in text
