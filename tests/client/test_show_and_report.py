"""perfagent show and report: of a real training that met a NaN in its data and crashed, and of runs larger than any page."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api_builders import ADMIN, Listening, frame, listening
from builders import job_environment, until
from command_line import command, in_terminal
from recorded import send, training

from perfagent.command_line.terminal_output import Screen, Table
from perfagent.wire import Alert, Event, Finding, Latest, Quantiles, Series, Spent, Timing
from perfagent_client import Client
from perfagent_client.models import RunDetails
from perfagent_client.page import fitted, flat
from perfagent_client.report.charts import names_of_charts
from perfagent_client.report.facts import ReportFacts
from perfagent_client.report.page import report_html
from perfagent_client.run_sections import Facts, sections

pytestmark = pytest.mark.real

ILL = """
import torch, perfagent
torch.manual_seed(0)
model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(32, 32), torch.nn.ReLU())], torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"lr": 1e-3, "hidden": 32, "data": {"set": "<b>mine</b>"}}
perfagent.attach(model, optimizer, name="ill job", project="tests", config=config)
inputs = torch.randn(40 * 16, 32)
inputs[30 * 16 + 3, 5] = float("nan")
print("epoch 1 of <1>", flush=True)
for step in range(40):
    batch = inputs[16 * step : 16 * step + 16]
    loss = (model(batch) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    perfagent.log({"accuracy": step / 100})
raise ValueError("after <all> of it")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    folder = tmp_path_factory.mktemp("show")
    with listening(folder) as running:
        environment = job_environment(folder, PERFAGENT_SERVER=running.url)
        (folder / "job.py").write_text(ILL)
        started = [sys.executable, "-m", "perfagent", "run", "job.py"]
        subprocess.run(started, env=environment, timeout=150, cwd=folder, capture_output=True)
        with Client(running.url) as client:
            [ended] = until(lambda: list(client.runs(name="ill job", state="failed")), why="the run did not fail")
            run = ended.run

            def found() -> Alert | None:
                by_rule = {finding.rule: finding for finding in client.findings(run)}
                whole = "process_crash" in by_rule and by_rule["nonfinite_loss"].evidence.get("causes")
                alerts = [alert for alert in client.alerts(run) if alert.rule == "nonfinite_loss"]
                return alerts[0] if whole and alerts and client.events(run, kind="log") else None

            alert = until(found, why="no cause was found")
            path = f"{running.url}/api/v1/alerts/{alert.id}/ack"
            client.http.post(path, json={"note": "I <looked>"}, headers=ADMIN).raise_for_status()
        yield running


@pytest.fixture(autouse=True)
def its_address(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_SERVER", server.url)


def test_the_page_of_an_ill_run_has_its_findings_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    shown = command(capsys, "show", "ill job")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert len(lines) <= 60
    [finding] = [line for line in lines if line.startswith("[critical] nonfinite_loss: ")]
    assert "in step 31" in finding and "'batch'" in finding
    text = " ".join(shown.out.split())
    for part in (
        "loss NaN in step 40 (newest)", "10 values not finite", "samples/s", "whole step 100.0 %", "iB of ", "Process memory",
        "accuracy 0.39 (step 40)",
    ):  # fmt: skip
        assert part in text, part
    assert "e+" not in shown.out, "a raw figure"
    assert "grad_norm/" not in shown.out, "layers are for --all"


def test_all_adds_every_layer_and_the_raw_values(capsys: pytest.CaptureFixture[str]) -> None:
    page = command(capsys, "show", "ill job", "--all").out
    text = " ".join(page.split())
    # what the short page has room for depends on what else there was to say
    for part in (
        "optimizer: AdamW, lr 0.001", "of the script: lr 0.001, hidden 32", "Fix: Look at the samples of that batch",
        "batch of step 31: fingerprint ", "local variables of", "batch float32[16, 32]: 1 non-finite, finite range -",
    ):  # fmt: skip
        assert part in text, part
    lines = [line.split() for line in page.splitlines() if line]
    raw_at = lines.index(["RAW", "VALUES", "(newest)"])
    layers = [line[0] for line in lines[lines.index(["LAYERS", "(newest)"]) : raw_at]]
    assert layers.index("0.weight") < layers.index("2.weight") < layers.index("8.weight")
    raw = {line[0]: line[1:] for line in lines[raw_at:]}
    assert raw["accuracy"] == ["0.39", "40", "0"]
    assert raw["memory/parameters_bytes"][1] == "B"


def test_report_of_a_run_that_went_wrong_has_all_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ill.html"
    ended = command(capsys, "report", "ill job", "-o", str(file))
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    html = file.read_text("utf-8")
    for part in (
        "<title>ill job: ", "The loss became NaN in step 31", "fingerprint ",
        "nonfinite_loss", "process_crash", "ValueError: after &lt;all&gt; of it", "epoch 1 of &lt;1&gt;", "acknowledged",
        "I &lt;looked&gt;", "data.set", "&lt;b&gt;mine&lt;/b&gt;", "optimizer.class", "AdamW", "CPU core hours", "torch",
        "the whole run", "whole step", 'data-name="loss"', 'data-name="grad/norm"', 'data-name="step_time_s"',
        'class="nonfinite"', 'class="mark critical"',
    ):  # fmt: skip
        assert part in html, part
    assert "<script" not in html and " style=" not in html and "src=" not in html
    assert command(capsys, "report", "ill job", "-o", "-").out.startswith("<!doctype html>\n")


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_of_eighty_columns_holds_the_page(server: Listening, rich: bool) -> None:
    shown = in_terminal(["show", "ill job"], {**os.environ, "PERFAGENT_SERVER": server.url}, rich=rich)
    assert shown.code == 0, shown.text
    lines = shown.text.rstrip().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) < 80
    assert ("\x1b[1;31m[critical] nonfinite_loss" in shown.sent) is rich
    assert ("\x1b" in shown.sent) is rich


# ------------------------------------------------------------------------------------------------------------------- --


def story(server: Listening, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that trains 6 steps, one each time somebody has seen the one before, and then ends."""

    def send(step: int, events: tuple[Event, ...] = ()) -> None:
        values = {"loss": [1.0 / step], "step_time_s": [0.02]}
        server.take(frame(values, run=run, name=run, seq=step, first_step=step, events=events))

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


def test_follow_prints_lines_for_news_and_ends_with_the_run(
    server: Listening, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story(server, "followed", monkeypatch)
    shown = command(capsys, "show", "followed", "--follow")
    assert shown.code == 0
    updates = [line for line in shown.out.splitlines() if "  step " in line and "a step (median of " in line]
    assert len(updates) >= 2
    assert "running  step" in updates[0]
    assert "finished  step 6  loss 0.166667  20 ms a step (median of the whole run)  healthy" in updates[-1]
    assert "finished, step 6" in shown.out, "the page at the end"


def test_follow_redraws_the_page_on_a_terminal(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    story(server, "drawn", monkeypatch)
    shown = in_terminal(["show", "drawn", "--follow"], {**os.environ, "PERFAGENT_SERVER": server.url}, rows=24)
    assert shown.code == 0, shown.text
    assert shown.text.count("drawn  (p, drawn)") >= 3, "drawn again and again"
    assert "\x1b[2K" in shown.sent or "\x1b[1A" in shown.sent, "over what was there"
    assert "finished, step 6" in shown.text


def test_spike_in_a_long_run_reaches_the_top_of_its_chart(
    server: Listening, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = np.arange(1, 8_001)
    values = {name: column for name, column in training(steps).items() if name in ("loss", "step_time_s")}
    values["loss"][6_345] = 60.0
    for seq in (1, 2):
        part = slice(4_000 * (seq - 1), 4_000 * seq)
        send(server, "long", {name: column[part] for name, column in values.items()}, steps[part], seq=seq)  # type: ignore[arg-type]
    file = tmp_path / "long.html"
    assert command(capsys, "report", "long", "-o", str(file)).code == 0
    html = file.read_text("utf-8")
    assert len(html.encode()) < 300_000
    assert "highest 60 in steps " in html
    svg = html[html.index('data-name="loss"') :].partition("</svg>")[0]
    points = re.findall(r",([\d.]+)", svg.partition('class="band" d="')[2].partition('"')[0])
    heights = sorted(map(float, points))
    assert heights[0] < 25 and heights[1] > 80, "the spike is at the top, and everything else far below"


# --------------------------------------------------------------------------------------- of facts that no server is for

QUANTILES = Quantiles(p50=1e-7, p90=1.0, p99=9e6, mean=2.0, count=9)
NO_TIMING = Timing(from_step=0, to_step=0, series={}, shares={})
HEALTHY = Finding(rule="healthy", severity="info", message="Nothing to judge yet.")


def bare_run() -> RunDetails:
    begun = "2026-01-01T00:00:00Z"
    return RunDetails(run="r2", project="p", name="empty", state="starting", step=0, started=begun, updated=begun)


def series(name: str, values: list[float]) -> Series:
    steps = list(range(1, len(values) + 1))
    return Series(
        name=name, rank="all", unit="", exact=True, step=steps, min=values, max=values, mean=values, count=[1] * len(steps),
        nonfinite=[not math.isfinite(value) for value in values],
    )  # fmt: skip


def huge_run(words: str) -> RunDetails:
    return replace(
        bare_run(), name=words, state="failed", step=10**9, reason=words, world_size=4096, notes=words * 9,
        spent=Spent(hours=1e9), config={f"group{g}": {f"k{n}": words for n in range(30)} for g in range(60)},
        meta={"packages": {f"package{n}": "1.0" for n in range(2000)}, "command": ["python"] * 9000, "torch": "2"},
    )  # fmt: skip


def huge_findings(words: str) -> list[Finding]:
    evidence = {"traceback": f"{words}\n" * 900, "losses": [1.0] * 900, **{f"k{number}": words for number in range(90)}}
    ranks = list(range(4000))
    return [
        Finding(rule=f"rule_{n}", severity="warning", message=words, fix=words, ranks=ranks, evidence=evidence)
        for n in range(60)
    ]


def huge() -> Facts:
    """More of everything than any page holds."""
    names = [f"grad_norm/layers.{layer}.weight" for layer in range(300)] + [f"metric/{number}" for number in range(500)]
    names += [f"node_gpu{gpu}/utilization_pct" for gpu in range(16)]
    names += ["gpu/utilization_pct", "gpu/xid", "host/cpu_pct", "loss", "lr"]
    words = "word " * 400
    findings = huge_findings(words)
    phases = dict.fromkeys(("step_time_s", *(f"phase/own{number}_s" for number in range(90))), QUANTILES)
    return Facts(
        huge_run(words), findings[0], findings, {name: Latest(value=1e300, step=10**9, time=0.0, rank=0) for name in names},
        Timing(from_step=1, to_step=10**9, series=phases, shares={}), series("loss", [math.nan] * 48),
        "http://127.0.0.1:8420/run/r1",
    )  # fmt: skip


def page_texts(facts: Facts, *, most: int = 60, width: int | None = None) -> list[str]:
    screen = Screen()
    screen.width = width
    page = flat(fitted(sections(facts, screen.wrapped), most))
    assert sum(len(part) if isinstance(part, Table) else 1 for part in page) <= most
    return [part.text for part in page if not isinstance(part, Table)]


@pytest.mark.parametrize(("most", "width"), [(60, None), (60, 200), (60, 40), (30, 80), (12, 80)])
def test_no_run_is_too_large_for_the_page(most: int, width: int | None) -> None:
    texts = page_texts(huge(), most=most, width=width)
    assert any("--all" in text for text in texts)
    if most == 60:
        assert {"VERDICT", "PROGRESS", "WHERE A STEP GOES"} <= set(texts)


def test_a_run_that_says_nothing_has_a_page_and_a_report_too() -> None:
    assert page_texts(Facts(bare_run(), HEALTHY, [], {}, NO_TIMING))[:2] == ["empty  (p, r2)", "starting, step 0"]
    html = report_html(ReportFacts(bare_run(), HEALTHY, [], {}, NO_TIMING))
    assert "Nothing to judge yet." in html and "No alert has fired." in html
    for heading in ("Charts", "Where a step goes", "Configuration", "console"):
        assert heading not in html


def test_agent_overhead_is_never_negative_and_no_gpu_no_figure() -> None:
    values = {"agent/overhead_pct": -4.31, "sync/calls_per_step": 5.0, "host/cpu_pct": 50.0}
    newest = {name: Latest(value=value, step=9, time=1.0, rank=0) for name, value in values.items()}
    text = "\n".join(page_texts(Facts(bare_run(), HEALTHY, [], newest, NO_TIMING)))
    assert "Agent overhead < 0.1 %" in text and "Synchronizing" not in text


def test_the_charts_are_chosen_by_what_the_run_has() -> None:
    names = {
        "val/loss",
        "loss",
        "loss/kl",
        "samples_per_s",
        "tokens_per_s",
        "lr",
        "accuracy",
        "grad_norm/w",
        "host/cpu_pct",
    }
    assert names_of_charts(names) == ["loss", "loss/kl", "val/loss", "lr", "tokens_per_s", "host/cpu_pct", "accuracy"]
    assert len(names_of_charts({f"metric/{number}" for number in range(500)})) == 12


def test_an_event_of_an_unknown_form_is_left_out() -> None:
    odd = [{"data": None}, {"data": {"lines": "text"}}, {}, {"rank": 0, "data": {"lines": ["\x1b[31mred\x00", 5]}}]
    html = report_html(ReportFacts(bare_run(), HEALTHY, [], {}, NO_TIMING, logs=odd, states=odd))
    assert "\ufffd[31mred\ufffd\n5" in html
