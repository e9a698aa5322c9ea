"""perfagent backtest: files, folders, recordings and runs of a server."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN_TOKEN, Listening, listening
from builders import free_port
from commands import perfagent, perfagent_process
from preloaded import Ended

from perfagent.delivery.spool import Header, Spool
from perfagent.wire import Event, Frame, Group, encode
from perfagent_client.client import Client

pytestmark = pytest.mark.real

START = 1_700_000_000.0
ALERT_FIELDS = ["rule", "severity", "onset_step", "first_step", "last_step", "message"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("backtest")) as running:
        yield running


def backtest(folder: Path, *words: object, **env: str) -> Ended:
    return perfagent(folder, "backtest", *map(str, words), **env)


def runs(ended: Ended) -> list[dict[str, Any]]:
    assert ended.returncode == 0, ended.stderr
    found: list[dict[str, Any]] = json.loads(ended.stdout)["runs"]
    return found


def one_line(text: str) -> str:
    [line] = text.splitlines()
    return line


def with_nan(path: Path, at: int = 30, steps: int = 60) -> Path:
    rows = [f"{step},{math.nan if step == at else 3 / step}" for step in range(1, steps + 1)]
    path.write_text("\n".join(["step,loss", *rows]) + "\n")
    return path


def recording(folder: Path, losses: Sequence[float], *, rank: int = 0, run: str = "rec") -> None:
    source = f"{rank}" * 32
    header = Header(source=source, project="p", rank=rank, server=None, run=run, attempt=1, name="night")
    spool = Spool(folder / source, header, recording=True)
    began = Event(kind="state", time=START, data={"state": "starting", "world_size": 2, "name": "night"})
    for part, first in enumerate(range(0, len(losses), 20)):
        piece = [*losses[first : first + 20]]
        steps = list(range(first + 1, first + 1 + len(piece)))
        times = [START + step for step in steps]
        spool.append([Group(steps, times, times, {"loss": piece})], [] if part else [began], now=60.0 * part)
        spool.hold(now=60.0 * part + 61)
    spool.close()


def test_file_is_judged_and_printed_as_by_the_interface(tmp_path: Path) -> None:
    path = with_nan(tmp_path / "curve.csv")
    [run] = runs(backtest(tmp_path, path, "--json"))
    assert list(run) == ["file", "steps", "alerts"]
    assert (run["file"], run["steps"]) == (str(path), 60)
    [alert] = run["alerts"]
    assert list(alert) == ALERT_FIELDS
    assert [alert[name] for name in ALERT_FIELDS[:5]] == ["nonfinite_loss", "critical", 30, 30, 30]
    assert "NaN in step 30" in alert["message"]


def test_people_get_a_line_a_run_and_a_table_of_its_alerts(tmp_path: Path) -> None:
    with_nan(tmp_path / "a.csv")
    with_nan(tmp_path / "b.csv", at=999)
    ended = backtest(tmp_path, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, head, row, second, total = ended.stdout.splitlines()
    assert first == f"{tmp_path / 'a.csv'}: 60 steps, 1 alert"
    assert head.split() == ["SEVERITY", "RULE", "ONSET", "FIRED", "LAST", "MESSAGE"]
    assert row.split()[:5] == ["critical", "nonfinite_loss", "30", "30", "30"]
    assert second == f"{tmp_path / 'b.csv'}: 60 steps, no alert"
    assert total == "2 runs, 120 steps: 1 alert at warning or above, 0 remarks"


def test_thresholds_of_a_file_count_and_rules_can_be_off(tmp_path: Path) -> None:
    curve = tmp_path / "step.csv"  # up by less than the rule's own threshold of 4 %
    draw = random.Random(1)
    losses = [3.0 + draw.gauss(0, 0.01) + 0.1 * (step > 300) for step in range(1, 401)]
    curve.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses, start=1)))
    rules = tmp_path / "rules.toml"
    [run] = runs(backtest(tmp_path, curve, "--json"))
    assert "loss_spike" not in {alert["rule"] for alert in run["alerts"]}
    rules.write_text("[loss_spike]\nrise_pct = 1.0\n")
    [run] = runs(backtest(tmp_path, curve, "--rules", rules, "--json"))
    assert "loss_spike" in {alert["rule"] for alert in run["alerts"]}
    rules.write_text("[nonfinite_loss]\nenabled = false\n")
    [run] = runs(backtest(tmp_path, with_nan(tmp_path / "curve.csv"), "--rules", rules, "--json"))
    assert run["alerts"] == []


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("[loss_spikes]\nrise_pct = 1\n", "there is no rule 'loss_spikes'; there are "),
        ("loss_spike\n", "is no TOML"),
        (None, "--rules: there is no file"),
    ],
)
def test_rules_that_there_are_not_are_told_with_what_is_allowed(tmp_path: Path, rules: str | None, said: str) -> None:
    path = tmp_path / "rules.toml"
    if rules is not None:
        path.write_text(rules)
    ended = backtest(tmp_path, with_nan(tmp_path / "curve.csv"), "--rules", path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in one_line(ended.stderr)


def test_a_recording_is_judged_over_its_ranks_and_left_as_it_was(tmp_path: Path) -> None:
    """Also beside the process that still writes it; several runs in it are judged apart."""
    folder = tmp_path / "recorded"
    recording(folder, [1.0] * 100, rank=0)
    recording(folder, [1.0] * 70 + [math.nan] + [1.0] * 29, rank=1)
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    spool = Spool.open(folder / ("0" * 32), recording=True)
    [run] = runs(backtest(tmp_path, folder, "--json"))
    spool.abandon()
    assert (run["file"], run["steps"]) == (str(folder), 100)
    [alert] = run["alerts"]
    assert (alert["rule"], alert["onset_step"], "on rank 1" in alert["message"]) == ("nonfinite_loss", 71, True)
    assert 71 <= alert["first_step"] <= 72
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before
    recording(folder, [1.0] * 20, rank=2, run="two")
    found = runs(backtest(tmp_path, folder, "--json"))
    assert [(one["file"].rpartition(": ")[2], one["steps"]) for one in found] == [("rec", 100), ("two", 20)]


def test_damaged_recording_is_judged_as_far_as_whole_and_fails(tmp_path: Path) -> None:
    recording(tmp_path / "recorded", [1.0] * 60)
    [path] = (tmp_path / "recorded").glob("*/*.frames")
    data = bytearray(path.read_bytes())
    data[-20] ^= 0xFF
    path.write_bytes(data)
    ended = backtest(tmp_path, tmp_path / "recorded")
    assert ended.returncode == 1
    assert "1 file damaged; what is whole in it was judged" in one_line(ended.stderr)
    assert ended.stdout.endswith("recorded: 40 steps, no alert\n")


def send(server: Listening, losses: Sequence[float], *, run: str, name: str, attempt: int = 1, begin: int = 1) -> None:
    steps = list(range(begin, begin + len(losses)))
    times = [START + 1000 * attempt + step for step in steps]
    began = {"state": "running", "world_size": 1, "start_step": begin if begin > 1 else 0, "name": name}
    frame = Frame(
        project="p", run=run, source=f"{run}-{attempt}", attempt=attempt, rank=0, seq=1, name=name,
        groups=[Group(steps, times, times, {"loss": [*losses], "lr": [0.1] * len(losses)})],
        events=[Event(kind="state", time=times[0], data=began)],
    )  # fmt: skip
    with Client(server.url, ADMIN_TOKEN) as client:
        headers = {"Content-Type": "application/x-msgpack"}
        client.http.post(f"{server.url}/api/v1/ingest", content=encode(frame), headers=headers).raise_for_status()


def test_run_of_a_server_is_judged_by_id_name_or_export(server: Listening, tmp_path: Path) -> None:
    send(server, [1.0] * 30 + [math.inf] + [1.0] * 9, run="run-a", name="a run/with a name")
    where = {"PERFAGENT_SERVER": server.url}
    for word in ("run-a", "a run/with a name"):
        [run] = runs(backtest(tmp_path, word, "--json", **where))
        assert (run["file"], run["steps"]) == (word, 40)
        assert [(one["rule"], one["first_step"]) for one in run["alerts"]] == [("nonfinite_loss", 31)]
    path = tmp_path / "samples.csv"
    assert perfagent(tmp_path, "export", "run-a", "--format", "csv", "-o", str(path), **where).returncode == 0
    [by_file] = runs(backtest(tmp_path, path, "--json"))
    assert by_file["alerts"] == run["alerts"]
    send(server, [1.0] * 25, run="run-a", name="a run/with a name", attempt=2, begin=21)
    [run] = runs(backtest(tmp_path, "run-a", "--json", **where))
    assert (run["steps"], run["alerts"]) == (45, []), "what lies at or after the new start is cut from view"


def test_what_is_not_there_is_told_in_a_line(server: Listening, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    where = {"PERFAGENT_SERVER": server.url}
    for words, code, said in (
        (["none.csv"], 2, "there is no file or folder none.csv"),
        (["./some/folder"], 2, "there is no file or folder ./some/folder"),
        ([empty], 2, "holds neither CSV files (*.csv) nor a recording"),
        (["no-such-run"], 1, "there is no file, no folder and no run 'no-such-run'"),
    ):
        ended = backtest(tmp_path, *words, **where)
        assert (ended.returncode, ended.stdout) == (code, ""), ended
        assert said in one_line(ended.stderr)
    away = backtest(tmp_path, "no-such-run", PERFAGENT_SERVER=f"http://127.0.0.1:{free_port()}")
    assert away.returncode == 1
    assert "no file or folder 'no-such-run', and as a run: the server" in one_line(away.stderr)


def test_a_wrong_column_is_wrong_use_and_nothing_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("iteration,loss\n1,2\n")
    ended = perfagent_process(tmp_path, "backtest", str(path), "--json")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no column `step`" in one_line(ended.stderr)
    assert perfagent_process(tmp_path, "backtest").returncode == 2
