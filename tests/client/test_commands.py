"""perfagent runs, show, export and delete against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import commands
import pytest
from api_builders import ADMIN_TOKEN, Listening, frame, listening
from builders import free_port, web
from preloaded import Ended
from pyarrow import parquet

from perfagent_client.commands import moment

pytestmark = pytest.mark.real

VALUES = [1 / 3, 0.1, 1e-300]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("server")) as running:
        running.take(frame({"loss": VALUES}, name="my run", project="demo"))
        yield running


def perfagent(server: Listening, folder: Path, *arguments: str, **env: str) -> Ended:
    return commands.perfagent(folder, *arguments, PERFAGENT_SERVER=server.url, **env)


def test_runs_are_listed(server: Listening, tmp_path: Path) -> None:
    table = commands.perfagent_process(tmp_path, "runs", PERFAGENT_SERVER=server.url)
    assert table.returncode == 0, table.stderr
    assert "my run" in table.stdout and "demo" in table.stdout
    found = json.loads(perfagent(server, tmp_path, "runs", "--json", "--project", "demo").stdout)
    assert [run["name"] for run in found["runs"]] == ["my run"]
    assert json.loads(perfagent(server, tmp_path, "runs", "--json", "--project", "other").stdout) == {"runs": []}
    unknown = perfagent(server, tmp_path, "runs", "--state", "sleeping")
    assert (unknown.returncode, len(unknown.stderr.splitlines())) == (2, 1), "noticed by the server, and wrong use"
    assert "'sleeping'" in unknown.stderr and "running" in unknown.stderr
    for limit in ("0", "many"):
        wrong = perfagent(server, tmp_path, "runs", "--limit", limit)
        assert wrong.returncode == 2 and "not a whole number above 0" in wrong.stderr


def test_runs_come_with_verdict_loss_throughput_and_tags(server: Listening, tmp_path: Path) -> None:
    body = {"run": "tagged", "project": "rates", "step": 5, "metrics": {"train_loss": 0.25, "samples_per_s": 1234.0}}
    web().post(f"{server.url}/api/v1/log", json=body).raise_for_status()
    [listed] = web().get(f"{server.url}/api/v1/runs", params={"project": "rates"}).json()["runs"]
    web().patch(f"{server.url}/api/v1/runs/{listed['run']}", json={"tags": ["night"]}).raise_for_status()
    asked = ("runs", "--project", "rates", "--since", "1h", "--sort", "severity")
    table = commands.perfagent_process(tmp_path, *asked, PERFAGENT_SERVER=server.url, TZ="Asia/Tokyo").stdout
    assert all(word in table for word in ("healthy", "0.25", "1234", "night", "STARTED (JST)"))
    asked = ("runs", "--json", "--project", "rates", "--severity", "healthy", "--severity", "info")
    [row] = json.loads(perfagent(server, tmp_path, *asked).stdout)["runs"]
    assert (row["severity"], row["rule"], row["loss"], row["samples_per_s"]) == ("healthy", "healthy", 0.25, 1234.0)
    assert row["started"].endswith("Z") and row["config"] == {} and row["tags"] == ["night"]
    none = perfagent(server, tmp_path, "runs", "--project", "rates", "--severity", "critical")
    assert "no runs like that" in none.stdout
    wrong = perfagent(server, tmp_path, "runs", "--since", "yesterday")
    assert wrong.returncode == 2 and "24h" in wrong.stderr
    for since, seconds in {"30s": 30, "3m": 180, "90min": 5400, "24h": 86_400, "7d": 604_800}.items():
        ago = datetime.now(UTC).timestamp() - datetime.fromisoformat(moment(since)).timestamp()
        assert seconds <= ago + 1 < seconds + 5


@pytest.mark.parametrize("run", ["r1", "my run"])
def test_show_takes_an_id_or_a_name(server: Listening, tmp_path: Path, run: str) -> None:
    shown = perfagent(server, tmp_path, "show", run, "--json")
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert {"run", "project", "name", "state", "step", "verdict", "findings", "latest"} <= told.keys()
    assert (told["run"], told["step"], told["latest"]) == ("r1", 3, {"loss": VALUES[-1]})
    assert {"rule", "severity", "message", "since_step", "since", "ranks", "evidence", "fix"} <= told["verdict"].keys()
    text = perfagent(server, tmp_path, "show", run)
    assert "my run" in text.stdout and "loss" in text.stdout


def test_export_writes_to_standard_output_or_a_file(server: Listening, tmp_path: Path) -> None:
    for kind in ("jsonl", "csv"):
        printed = perfagent(server, tmp_path, "export", "my run", "--format", kind)
        assert printed.returncode == 0, printed.stderr
        assert all(repr(value) in printed.stdout for value in VALUES)
        target = tmp_path / "out"
        written = perfagent(server, tmp_path, "export", "my run", "--format", kind, "-o", str(target))
        assert (written.returncode, written.stdout) == (0, "")
        assert target.read_text() == printed.stdout
    target = tmp_path / "out.parquet"
    written = perfagent(server, tmp_path, "export", "my run", "--format", "parquet", "-o", str(target))
    assert (written.returncode, written.stdout) == (0, ""), written.stderr
    table = parquet.read_table(target)
    lines = [json.loads(line) for line in perfagent(server, tmp_path, "export", "my run").stdout.splitlines()]
    assert table.column("step").to_pylist() == [line["step"] for line in lines]
    assert set(VALUES) <= set(table.column("value").to_pylist())


def test_what_is_not_there_is_answered_with_what_is(server: Listening, tmp_path: Path) -> None:
    ended = perfagent(server, tmp_path, "show", "My runn")
    assert ended.returncode == 1 and "did you mean 'my run'? `perfagent runs` lists" in ended.stderr
    admin = {"PERFAGENT_ADMIN_TOKEN": ADMIN_TOKEN}
    for words, lists in (
        (("compare", "my run", "nope"), "runs"),
        (("alerts", "ack", "nope"), "alerts list"),
        (("silences", "remove", "nope"), "silences list"),
        (("channels", "remove", "nope"), "channels list"),
    ):
        ended = perfagent(server, tmp_path, *words, **admin)
        assert ended.returncode == 1 and f"`perfagent {lists}` lists them" in ended.stderr, ended.stderr


def test_failures_end_with_one_and_wrong_use_with_two(server: Listening, tmp_path: Path) -> None:
    cannot = ("export", "r1", "-o", "/no/such/folder/file")
    for arguments in (("show", "nothing"), ("export", "nothing"), ("delete", "nothing", "--yes"), cannot):
        ended = perfagent(server, tmp_path, *arguments)
        assert ended.returncode == 1, arguments
        assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert perfagent(server, tmp_path, "stop").returncode == 2
    assert perfagent(server, tmp_path, "export", "r1", "--format", "xml").returncode == 2
    nobody = perfagent(server, tmp_path, "runs", "--server", f"http://127.0.0.1:{free_port()}")
    assert nobody.returncode == 1 and "perfagent up" in nobody.stderr


def test_no_name_or_one_without_its_ending_is_the_newest_run(server: Listening, tmp_path: Path) -> None:
    for at, run, name in ((1, "qr7xold", "train-qr7x"), (60, "hcxbnew", "train-hcxb"), (90, "wwwwnew", "train-off")):
        server.take(frame({"loss": [1.0]}, run=run, first_step=at, name=name))
    newest = json.loads(perfagent(server, tmp_path, "runs", "--json", "--limit", "1").stdout)["runs"][0]
    for words, run in (([], newest["run"]), (["train"], "hcxbnew")):
        shown = perfagent(server, tmp_path, "show", "--json", *words)
        assert json.loads(shown.stdout)["run"] == run
        assert run in shown.stderr and len(shown.stderr.splitlines()) == 1, "it says which it chose"
    for changes in (["stop"], ["delete", "--yes"]):
        refused = perfagent(server, tmp_path, *changes, "train", PERFAGENT_ADMIN_TOKEN=ADMIN_TOKEN)
        assert refused.returncode == 1 and "there is no run" in refused.stderr


def test_a_name_of_several_runs_is_the_newest_and_none_to_delete(server: Listening, tmp_path: Path) -> None:
    for project in ("one", "two"):
        row = {"project": project, "run": "twin", "metrics": {"x": 1}}
        web().post(f"{server.url}/api/v1/log", json=row).raise_for_status()
    listed = json.loads(perfagent(server, tmp_path, "runs", "--name", "twin", "--json").stdout)["runs"]
    ids = [run["run"] for run in listed]
    assert len(ids) == 2
    shown = perfagent(server, tmp_path, "show", "twin", "--json")
    assert json.loads(shown.stdout)["run"] == ids[0]
    assert shown.stderr == f"perfagent: 2 runs are named 'twin'; this is the newest, {ids[0]}\n"
    refused = perfagent(server, tmp_path, "delete", "twin", "--yes", PERFAGENT_ADMIN_TOKEN=ADMIN_TOKEN)
    assert refused.returncode == 1
    assert "2 runs are named 'twin'" in refused.stderr and all(run in refused.stderr for run in ids)
    for run in ids:
        denied = perfagent(server, tmp_path, "delete", run, "--yes")
        assert denied.returncode == 1 and "administrator" in denied.stderr
        assert perfagent(server, tmp_path, "delete", run, "--yes", PERFAGENT_ADMIN_TOKEN=ADMIN_TOKEN).returncode == 0
        assert perfagent(server, tmp_path, "show", run).returncode == 1
