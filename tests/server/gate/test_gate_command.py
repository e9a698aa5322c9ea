"""perfagent gate: its exit codes, on stored runs and on commands that run in turn."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import psutil
import pytest
from api_builders import frame, listening
from code_scanning import assert_shown
from command_line import ran
from json_shapes import differences, shapes

from perfagent.errors import ConfigError, ServerUnreachable
from perfagent.wire import Finding
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.replay import BacktestAlert
from perfagent_server.ci_reports import Result, sarif
from perfagent_server.commands.gate import command
from perfagent_server.gate.judgment import CANNOT_TELL, FINE, WORSE, as_if_never_stopped, new_findings
from perfagent_server.gate.turns import Block, Command, Job, in_turn
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan

pytestmark = pytest.mark.real


def curve(
    path: Path, *, steps: int = 400, slower: float = 1.0, nan: bool = False, seed: int = 1, noise: float = 0.02
) -> str:
    random = np.random.default_rng(seed)
    seconds = 0.1 * slower * np.exp(random.normal(0, noise, steps))
    losses = 2 * np.exp(-np.arange(steps) / 100) + 0.5 + random.normal(0, 0.01, steps)
    rows = [
        f"{step},{math.nan if nan and step > 200 else loss},{one},{one - 0.09}"
        for step, (loss, one) in enumerate(zip(losses, seconds, strict=True), 1)
    ]
    path.write_text("\n".join(["step,loss,step_time_s,phase/data_s", *rows]) + "\n")
    return str(path)


def test_stored_runs_pass_fail_and_leave_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, again = curve(tmp_path / "base.csv"), curve(tmp_path / "again.csv", seed=2)
    assert ran(command, base, again) == FINE
    assert "not slower" in capsys.readouterr().out
    assert ran(command, base, curve(tmp_path / "slow.csv", slower=1.06, seed=2)) == WORSE
    assert "data wait grew most" in capsys.readouterr().out
    assert ran(command, base, curve(tmp_path / "little.csv", slower=1.06, seed=2), "--slower-than", "10%") == FINE
    assert ran(command, base, curve(tmp_path / "short.csv", steps=30)) == CANNOT_TELL
    assert ran(command, base, curve(tmp_path / "sick.csv", nan=True, seed=2)) == WORSE
    assert "nonfinite_loss" in capsys.readouterr().out
    assert ran(command, str(tmp_path / "sick.csv"), str(tmp_path / "sick.csv")) == FINE, "what BASE has is not new"


def test_faster_run_passes_however_wide_its_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = curve(tmp_path / "base.csv", noise=0.5)
    assert ran(command, base, curve(tmp_path / "fast.csv", slower=0.7, noise=0.5, seed=2), "--json") == FINE
    [wall] = json.loads(capsys.readouterr().out)["times"]
    assert wall["high"] - wall["low"] > 0.06 and wall["high"] < 1.0


def losses(path: Path, values: list[float]) -> str:
    rows = [f"{step},{value},0.1" for step, value in enumerate(values, 1)]
    path.write_text("\n".join(["step,loss,step_time_s", *rows]) + "\n")
    return str(path)


def test_remark_about_base_does_not_hide_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(3).normal(0, 0.05, 400)
    flat = losses(tmp_path / "flat.csv", [2.0 + one for one in draw])
    high = losses(tmp_path / "high.csv", [18.0 if step < 8 else 5.8 + one for step, one in enumerate(draw)])
    assert ran(command, flat, high, "--json") == WORSE
    [sicker] = json.loads(capsys.readouterr().out)["sicker"]
    assert (sicker["rule"], sicker["severity"]) == ("loss_plateau", "warning")
    assert ran(command, high, high) == FINE


def test_worst_of_several_alerts_of_a_rule_counts() -> None:
    fired = Finding(rule="loss_spike", severity="warning", title="", message="")
    alerts = [
        BacktestAlert("loss_spike", severity, 1, 1, 1, "", (0,), fired)
        for severity in ("warning", "critical", "warning")
    ]
    assert [one.severity for one in new_findings([], alerts, Plan(all_rules()))[0]] == ["critical"]


def test_runs_without_step_times_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare.csv"
    bare.write_text("step,loss\n" + "".join(f"{step},{1 / step}\n" for step in range(1, 60)))
    assert ran(command, curve(tmp_path / "base.csv"), str(bare)) == CANNOT_TELL
    assert "no step of NEW has a time" in capsys.readouterr().out


def test_reports_say_the_same_as_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, sick = curve(tmp_path / "base.csv"), curve(tmp_path / "sick.csv", slower=1.2, nan=True, seed=2)
    files = {name: tmp_path / name for name in ("junit", "sarif", "markdown")}
    words = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    assert ran(command, base, sick, "--json", *words) == WORSE
    said = json.loads(capsys.readouterr().out)
    assert not [*differences(said, shapes()["gate"])]
    assert (said["speed"], said["phase"], [one["rule"] for one in said["sicker"]]) == (
        "slower",
        "data",
        ["nonfinite_loss"],
    )
    suite = ElementTree.fromstring(files["junit"].read_text())
    assert [(case.get("name"), len(case.findall("failure"))) for case in suite] == [("speed", 1), ("health", 1)]
    results = assert_shown(json.loads(files["sarif"].read_text()))
    assert [(one["ruleId"], one["level"]) for one in results] == [("nonfinite_loss", "error"), ("slower", "error")]
    uris = {location_uri(one) for one in results}
    assert uris == {(tmp_path / "sick.csv").as_uri()}, "GitHub refuses a result without a location"
    assert files["markdown"].read_text().startswith("## perfagent gate: failed")
    assert ran(command, base, base, *words) == FINE
    assert "## perfagent gate: passed" in files["markdown"].read_text(), "a job summary is added to"
    assert assert_shown(json.loads(files["sarif"].read_text())) == []


def location_uri(result: dict[str, Any]) -> str:
    [location] = result["locations"]
    uri: str = location["physicalLocation"]["artifactLocation"]["uri"]
    return uri


def test_locations_are_relative_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code" / ".git").mkdir(parents=True)
    (tmp_path / "code" / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "code" / "runs")
    for name, uri in (
        ("bad name.csv", "runs/bad%20name.csv"),
        ("../x.csv", "x.csv"),
        (tmp_path / "50%.csv", (tmp_path / "50%.csv").as_uri()),
    ):
        [result] = assert_shown(
            json.loads(sarif("a tool", [Result("slower", "error", "slower", str(name))], {"slower": "slow"}))
        )
        assert location_uri(result) == uri


@pytest.mark.parametrize(
    "words",
    [
        [], ["one.csv"], ["a.csv", "b.csv", "c.csv"], ["a", "b", "--base-command", "python x.py"], ["--base-command", "'"],
        ["--base-command", "x", "--base-dir", "/nowhere"], ["./no.csv", "./no.csv"], ["a", "b", "--junit", "/nowhere/x"],
        ["a", "b", "--new-command", "python x.py"], ["a", "b", "--base-dir", "/tmp"], ["--base-command", "make && python x.py"],
        ["--base-command", 'python x.py "$RUN"'], ["--base-command", "SEED=1"],
    ],
)  # fmt: skip
def test_wrong_use_is_told(words: list[str]) -> None:
    with pytest.raises(ConfigError) as told:
        ran(command, *words)
    assert told.value.exit_code == 2


@pytest.mark.parametrize("option", ["--confidence", "--slower-than"])
def test_shares_are_not_taken_for_percentages(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as told:
        ran(command, "a", "b", option, "0.95")
    assert told.value.code == 2 and "write 95%" in capsys.readouterr().err


def test_command_lines_are_read_as_a_shell_would(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").touch()
    (tmp_path / "conf.py").touch()
    of = partial(Command.of, folder=tmp_path)
    read = of("""SEED=1 NAME='a b' python "it's; ok" 'x > $Y' a\\;b""")
    assert read.environment == {"SEED": "1", "NAME": "a b"}
    assert read.words == ("python", "it's; ok", "x > $Y", "a;b")
    for text, script in (
        ("python -u pkg/train.py conf.py", "pkg/train.py"),
        ("torchrun -m pkg.train", "pkg/train.py"),
        ("python conf.py -m lr=1", "conf.py"),
        ("python gone.py", "gone.py"),
    ):
        assert of(text).script == tmp_path / script


def test_runs_of_a_server_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(5)
    with listening(tmp_path / "server") as server:
        for name, factor in (("before", 1.0), ("after", 1.1)):
            seconds = (0.1 * factor * np.exp(random.normal(0, 0.02, 300))).tolist()
            server.take(frame({"loss": [1.0] * 300, "step_time_s": seconds}, run=name, name=name))
        assert ran(command, "before", "after", "--server", server.url, "--json") == WORSE
        [wall] = json.loads(capsys.readouterr().out)["times"]
        assert wall["low"] < 1.1 < wall["high"]
        assert ran(command, "after", "before", "--server", server.url) == FINE


def test_server_that_is_away_is_no_slower_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFAGENT_SERVER", "http://127.0.0.1:9")
    with pytest.raises(ServerUnreachable) as told:
        ran(command, "before", "after")
    assert told.value.exit_code == CANNOT_TELL


def test_one_command_stands_still_while_the_other_runs(tmp_path: Path) -> None:
    script = "import time\nwhile True:\n    print(time.time(), flush=True)\n    time.sleep(0.01)\n"
    (tmp_path / "job.py").write_text(script)
    began = time.monotonic()
    base, new = in_turn([Command.of("python job.py", tmp_path)] * 2, tmp_path, 6.0)
    assert time.monotonic() - began < 20
    for mine, other in ((base, new), (new, base)):
        written = [float(line) for line in mine.output(10_000)]
        assert len(written) > 20
        for block in other.blocks[: other.pairs]:
            assert not [one for one in written if block.begin + 0.1 < one < block.end - 0.1]
    assert base.exit_code is None, "it was ended"


def test_gate_that_is_cancelled_leaves_no_command_behind(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    seen: list[int] = []

    def cancel(deadline: float) -> None:
        while len(seen) < 2 and time.monotonic() < deadline:
            files = tmp_path.glob("*/output.txt")
            seen[:] = [int(text) for file in files if (text := file.read_text().strip())]
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    canceller = threading.Thread(target=cancel, args=(time.monotonic() + 60,))
    canceller.start()
    with pytest.raises(SystemExit) as ended:
        in_turn([Command.of("python job.py", tmp_path)] * 2, tmp_path, 90.0)
    canceller.join()
    assert ended.value.code == 143
    assert len(seen) == 2 and not any(map(psutil.pid_exists, seen))


def test_new_command_that_fails_is_worse_and_a_base_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("pass")
    (tmp_path / "bad.py").write_text("import os; raise SystemExit(f'no <data> for {os.environ[\"SEED\"]}')")
    words = ["--seconds", "20", "--sarif", "found.sarif", "--base-command"]
    assert ran(command, *words, "python good.py", "--new-command", "SEED=7 python bad.py") == WORSE
    written = capsys.readouterr()
    assert "NEW ended with exit code 1" in written.out and "no <data> for 7" in written.err
    [result] = assert_shown(json.loads((tmp_path / "found.sarif").read_text()))
    assert (result["ruleId"], location_uri(result)) == ("failed", "bad.py")
    assert ran(command, *words, "python good.py") == CANNOT_TELL
    assert "no step of BASE and NEW was seen" in capsys.readouterr().out
    assert ran(command, *words, "python bad.py", "--new-command", "python good.py") == CANNOT_TELL


def test_rules_do_not_see_the_pauses(tmp_path: Path) -> None:
    job = Job(Command(("x",), tmp_path), tmp_path, [Block(100.0, 110.0, 1, 0), Block(150.0, 160.0, 1, 0)])
    values = {"loss": 1.0, "step_time_s": 2.0, "phase/data_s": 1.0}
    moments = [Moment(time, step, values) for step, time in enumerate((105.0, 151.0, 155.0, 170.0))]
    seen = list(as_if_never_stopped(moments, job))
    assert [one.time for one in seen] == [105.0, 111.0, 115.0]
    assert [sorted(one.values) for one in seen] == [sorted(values), ["loss"], sorted(values)]
