"""perfagent report: one file on a run, read offline."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api_builders import ADMIN, Listening, listening
from builders import job_environment, until
from command_line import command
from recorded import send, training

from perfagent.wire import Alert, Event, Finding, Latest, Quantiles, Series, Spent, StepWindow, Timing
from perfagent_client import Client
from perfagent_client.models import RunDetails
from perfagent_client.report.charts import names_of_charts
from perfagent_client.report.facts import ReportFacts, ToldAlert
from perfagent_client.report.page import report_html

ILL = """
import torch, perfagent
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
perfagent.attach(model, optimizer, name="ill job", project="tests", config={"lr": 1e-3, "data": {"set": "<b>mine</b>"}})
inputs = torch.randn(40 * 16, 8)
inputs[30 * 16 + 3, 5] = float("nan")
print("epoch 1 of <1>", flush=True)
for step in range(40):
    loss = (model(inputs[16 * step : 16 * step + 16]) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
raise ValueError("after <all> of it")
"""
LONG = 8_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    """With a real training that met a NaN and crashed, and a run of 8,000 steps with a spike in one of them."""
    folder = tmp_path_factory.mktemp("report")
    with listening(folder) as running:
        environment = job_environment(folder, PERFAGENT_SERVER=running.url)
        started = [sys.executable, "-m", "perfagent", "run", "job.py"]
        (folder / "job.py").write_text(ILL)
        subprocess.run(started, env=environment, timeout=150, cwd=folder, capture_output=True)
        for seq, first in enumerate(range(1, LONG + 1, 4_000), 1):
            steps = np.arange(first, first + 4_000)
            values = {
                name: column for name, column in training(steps).items() if name in ("loss", "step_time_s", "grad/norm")
            }
            if first == 4_001:
                values["loss"][2_345] = 60.0
            send(running, "long", values, steps, seq=seq)  # type: ignore[arg-type] # only its address is asked for
        with Client(running.url) as client:
            [ended] = until(lambda: list(client.runs(name="ill job", state="failed")), why="the run did not fail")
            run = ended.run
            until(lambda: len({alert.rule for alert in client.alerts(run)}) >= 2, why="NaN and crash raised no alerts")
            until(lambda: client.events(run, kind="log"), why="what the job printed did not come")
            nan = next(alert for alert in client.alerts(run) if alert.rule == "nonfinite_loss")
            path = f"{running.url}/api/v1/alerts/{nan.id}/ack"
            client.http.post(path, json={"note": "I <looked>"}, headers=ADMIN).raise_for_status()
        yield running


@pytest.fixture(autouse=True)
def its_address(server: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_SERVER", server.url)


def test_the_report_of_a_run_that_went_wrong_tells_all_that_is_known(
    server: Listening, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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


def test_a_spike_of_one_step_in_a_long_run_reaches_the_top_of_its_chart(
    server: Listening, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "long.html"
    assert command(capsys, "report", "long", "-o", str(file)).code == 0
    html = file.read_text("utf-8")
    assert len(html.encode()) < 300_000
    assert "highest 60 in steps " in html
    svg = html[html.index('data-name="loss"') :].partition("</svg>")[0]
    points = re.findall(r",([\d.]+)", svg.partition('class="band" d="')[2].partition('"')[0])
    heights = sorted(map(float, points))
    assert heights[0] < 25 and heights[1] > 80, "the spike is at the top, and everything else far below"


def test_wrong_use_and_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command(capsys, "report", "ill job").error
        == "perfagent report: -o/--output is missing; see `perfagent report --help`"
    )
    refused = command(capsys, "report", "ill job", "-o", str(tmp_path / "no" / "file.html"))
    assert refused.code == 1 and "cannot be written" in refused.error
    assert command(capsys, "report", "no such run", "-o", str(tmp_path / "file.html")).code == 1
    assert not (tmp_path / "file.html").exists()


# --------------------------------------------------------------------------------------- of facts that no server is for


def bare_run() -> RunDetails:
    return RunDetails(
        run="r1", project="p", name="bare", state="starting", step=0, started="2026-01-01T00:00:00Z",
        updated="2026-01-01T00:00:00Z",
    )  # fmt: skip


def series(name: str, values: list[float]) -> Series:
    steps = list(range(1, len(values) + 1))
    bad = [0 if math.isfinite(value) else 1 for value in values]
    return Series(
        name=name, rank="all", unit="", exact=True, step=steps, min=values, max=values, mean=values, count=[1] * len(steps),
        nonfinite=bad,
    )  # fmt: skip


def test_a_run_that_says_nothing_has_a_report_too() -> None:
    nothing = Timing(from_step=0, to_step=0, series={}, shares={})
    html = report_html(
        ReportFacts(bare_run(), Finding(rule="healthy", severity="info", message="Too early."), [], {}, nothing)
    )
    assert "Too early." in html and "No alert has fired." in html
    for heading in ("Charts", "Where a step goes", "Configuration", "console"):
        assert heading not in html


def test_no_run_makes_a_report_of_more_than_a_megabyte() -> None:
    words = "word <&> " * 3000
    evidence = {"traceback": f"{words[:900]}\n" * 900, **{f"k{number}": words for number in range(90)}}
    findings = [
        Finding(rule=f"rule_{number}", severity="warning", message=words[:900], fix=words[:900], evidence=evidence)
        for number in range(60)
    ]
    alerts = [
        ToldAlert(
            Alert(id=str(n), state="firing", run="r1", rule="r", severity="info", message=words[:900], since="", since_step=n),
            [{"time": "", "event": "fired", "who": "rule", "note": words[:900]}] * 50,
        )
        for n in range(30)
    ]  # fmt: skip
    run = replace(
        bare_run(), world_size=9, notes=words * 9, reason=words, spent=Spent(hours=1e9),
        config={f"group{g}": {f"k{n}": words for n in range(30)} for g in range(60)},
        meta={"packages": {f"package{n}": "1.0" for n in range(2000)}, "command": ["python"] * 9000},
    )  # fmt: skip
    quantiles = Quantiles(p50=1.0, p90=1.0, p99=9e6, mean=2.0, count=9)
    phases = {f"own{number}": 0.01 for number in range(90)}
    timing = Timing(
        from_step=1, to_step=9, series={f"phase/{name}_s": quantiles for name in phases}, shares={}, phase_shares=phases,
        window=StepWindow(from_step=1, to_step=9, steps=9, bucket_steps=7),
    )  # fmt: skip
    wild = [-1e308, 1e308, math.nan, 1e-300, 5.0] * 72
    facts = ReportFacts(
        run, findings[0], findings, {"loss": Latest(value=1e300, step=480, time=0.0, rank=0)}, timing, alerts, 9999,
        [series(f"metric/{number}", wild) for number in range(27)],
        [{"rank": 3, "data": {"lines": [words[:500]] * 200}}] * 200, [{"data": {"traceback": words}}],
    )  # fmt: skip
    html = report_html(facts)
    assert len(html.encode()) < 1_000_000
    assert "These are the newest 30 of 9999." in html


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
    timing = Timing(from_step=0, to_step=0, series={}, shares={})
    odd = [{"data": None}, {"data": {"lines": "text"}}, {}, {"rank": 0, "data": {"lines": ["\x1b[31mred\x00", 5]}}]
    facts = ReportFacts(
        bare_run(), Finding(rule="healthy", severity="info", message="m"), [], {}, timing, logs=odd, states=odd
    )
    html = report_html(facts)
    assert "\ufffd[31mred\ufffd\n5" in html
    assert Event(kind="log", step=None, time=0.0, data={}).data == {}
