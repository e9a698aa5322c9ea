"""perfagent runs, show, export and delete against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import commands
import pytest
from api_builders import ADMIN_TOKEN, Listening, frame, listening
from builders import free_port, until, web
from preloaded import Ended
from pyarrow import parquet

from perfagent.command_line.option_types import moment
from perfagent.wire import Event, encode
from perfagent_client import ApiError, Client

VALUES = [1 / 3, 0.1, 1e-300]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("server")) as running:
        body = encode(frame({"loss": VALUES}, name="my run", project="demo"))
        headers = {"Content-Type": "application/x-msgpack"}
        web().post(f"{running.url}/api/v1/ingest", content=body, headers=headers).raise_for_status()
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
    for limit in ("0", "many", "-1"):
        wrong = perfagent(server, tmp_path, "runs", "--limit", limit)
        assert wrong.returncode == 2
        assert "not a whole number above 0" in wrong.stderr


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
    assert (
        "no runs like that"
        in perfagent(server, tmp_path, "runs", "--project", "rates", "--severity", "critical").stdout
    )
    wrong = perfagent(server, tmp_path, "runs", "--since", "yesterday")
    assert wrong.returncode == 2 and "24h" in wrong.stderr


@pytest.mark.parametrize("since", ["30s", "3m", "90min", "24h", "7d"])
def test_a_length_of_time_has_the_usual_units(since: str) -> None:
    seconds = {"30s": 30, "3m": 180, "90min": 5400, "24h": 86_400, "7d": 604_800}[since]
    before = datetime.now(UTC)
    told = datetime.fromisoformat(moment(since)).timestamp()
    assert before.timestamp() <= told + seconds <= datetime.now(UTC).timestamp()


def test_help_says_at_unknown_that_nothing_was_judged(tmp_path: Path) -> None:
    words = " ".join(commands.perfagent(tmp_path, "runs", "--help").stdout.split())
    assert "unknown: nothing was judged" in words


def test_runs_and_show_say_the_same_of_a_run(server: Listening, tmp_path: Path) -> None:
    """Also while a rule already finds something, and holds its alert back."""
    values = {"step_time_s": [0.5] * 32, "phase/data_s": [0.4] * 32, "samples_per_s": [103.0] * 31 + [619.0]}
    began = Event(kind="state", time=1_700_000_001.0, step=0, data={"state": "running"})
    body = encode(frame(values, run="held", name="held", project="held", events=[began]))
    web().post(
        f"{server.url}/api/v1/ingest", content=body, headers={"Content-Type": "application/x-msgpack"}
    ).raise_for_status()
    with Client(server.url) as client:
        until(lambda: client.verdict("held").rule == "data_bound")
        assert client.alerts("held") == []
        verdict, rates = client.verdict("held"), client.timing("held").rates
    [row] = json.loads(perfagent(server, tmp_path, "runs", "--json", "--project", "held").stdout)["runs"]
    assert (row["severity"], row["rule"]) == (verdict.severity, verdict.rule)
    assert row["samples_per_s"] == rates["samples_per_s"].p50 == 103.0
    table = perfagent(server, tmp_path, "runs", "--project", "held").stdout
    assert f"{verdict.severity} data_bound" in table and " 103 " in table and "619" not in table


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


def test_show_says_where_the_time_of_a_step_goes(server: Listening, tmp_path: Path) -> None:
    timed = frame({"loss": VALUES, "step_time_s": [0.1] * 3, "phase/data_s": [0.025] * 3}, run="timed", name="timed")
    headers = {"Content-Type": "application/x-msgpack"}
    web().post(f"{server.url}/api/v1/ingest", content=encode(timed), headers=headers).raise_for_status()
    shown = perfagent(server, tmp_path, "show", "timed")
    assert shown.returncode == 0, shown.stderr
    table = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "whole step 100.0 % 100 ms 100 ms 100 ms 100 ms 100 ms" in table
    assert "data 25.0 % 25 ms 25 ms 25 ms 25 ms 25 ms" in table
    assert "the newest 3 steps share median mean p90 p99 newest" in table


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_export_writes_to_standard_output_or_a_file(server: Listening, tmp_path: Path, kind: str) -> None:
    printed = perfagent(server, tmp_path, "export", "my run", "--format", kind)
    assert printed.returncode == 0, printed.stderr
    for value in VALUES:
        assert repr(value) in printed.stdout
    target = tmp_path / "out"
    written = perfagent(server, tmp_path, "export", "my run", "--format", kind, "-o", str(target))
    assert (written.returncode, written.stdout) == (0, "")
    assert target.read_text() == printed.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_parquet_file_reads_back_what_was_logged(server: Listening, tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    written = perfagent(server, tmp_path, "export", "my run", "--format", "parquet", "-o", str(target))
    assert (written.returncode, written.stdout) == (0, ""), written.stderr
    table = parquet.read_table(target)
    lines = [json.loads(line) for line in perfagent(server, tmp_path, "export", "my run").stdout.splitlines()]
    assert table.column("step").to_pylist() == [line["step"] for line in lines]
    assert set(VALUES) <= set(table.column("value").to_pylist())


def test_a_name_that_is_nearly_a_runs_is_answered_with_that_one(server: Listening, tmp_path: Path) -> None:
    ended = perfagent(server, tmp_path, "show", "My runn")
    assert ended.returncode == 1
    assert (
        "there is no run with the id or name 'My runn'; did you mean 'my run'? `perfagent runs` lists" in ended.stderr
    )


def test_what_lists_the_things_of_a_kind_is_named_as_a_command(server: Listening, tmp_path: Path) -> None:
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
    for arguments in (
        ("show", "nothing"),
        ("export", "nothing"),
        ("delete", "nothing", "--yes"),
        ("export", "r1", "-o", "/no/such/folder/file"),
    ):
        ended = perfagent(server, tmp_path, *arguments)
        assert ended.returncode == 1, arguments
        assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert perfagent(server, tmp_path, "show").returncode == 2
    assert perfagent(server, tmp_path, "export", "r1", "--format", "xml").returncode == 2
    assert perfagent(server, tmp_path, "runs", "--limit", "0").returncode == 2
    nobody = perfagent(server, tmp_path, "runs", "--server", f"http://127.0.0.1:{free_port()}")
    assert nobody.returncode == 1 and "perfagent up" in nobody.stderr


def test_show_prints_the_end_of_a_traceback(server: Listening, tmp_path: Path) -> None:
    ended = {"state": "failed", "reason": "ValueError: no", "exception": "ValueError"}
    event = Event(kind="state", step=3, time=1.79e9, data={**ended, "traceback": "Traceback ...\nValueError: no"})
    body = encode(frame({"loss": VALUES}, run="broken", name="broken", events=[event]))
    headers = {"Content-Type": "application/x-msgpack"}
    web().post(f"{server.url}/api/v1/ingest", content=body, headers=headers).raise_for_status()
    shown = until(
        lambda: (text := perfagent(server, tmp_path, "show", "broken").stdout) and "process_crash" in text and text
    )
    assert "    | Traceback ...\n    | ValueError: no\n" in shown


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
        assert perfagent(server, tmp_path, "delete", run, "--yes", PERFAGENT_ADMIN_TOKEN=ADMIN_TOKEN).returncode == 0


def test_delete_needs_the_administrator(server: Listening, tmp_path: Path) -> None:
    web().post(f"{server.url}/api/v1/log", json={"run": "short", "metrics": {"x": 1}}).raise_for_status()
    refused = perfagent(server, tmp_path, "delete", "short", "--yes")
    assert refused.returncode == 1 and "administrator" in refused.stderr
    deleted = perfagent(server, tmp_path, "delete", "short", "--yes", PERFAGENT_ADMIN_TOKEN=ADMIN_TOKEN)
    assert deleted.returncode == 0, deleted.stderr
    assert perfagent(server, tmp_path, "show", "short").returncode == 1


def test_a_series_that_a_run_has_not_is_an_error_that_names_near_ones(server: Listening) -> None:
    with Client(server.url) as client:
        assert len(repr(client.series("r1", "loss"))) < 120
        assert client.series("r1", "loss", from_step=10_000).step == [], "the name is right, and no such step came"
        with pytest.raises(ApiError, match="no series 'los'; did you mean 'loss'") as refused:
            client.series("r1", "los")
    assert refused.value.status == 404


def test_a_window_beyond_the_steps_of_a_run_is_cut_to_them_or_refused(server: Listening, tmp_path: Path) -> None:
    found = perfagent(server, tmp_path, "compare", "my run:1-2", "my run:1-9999", "--json")
    assert [side["name"] for side in json.loads(found.stdout)["sides"]] == ["my run:1-2", f"my run:1-{len(VALUES)}"]
    refused = perfagent(server, tmp_path, "compare", "my run", "my run:5000-6000")
    assert refused.returncode == 2 and "after the run's last step" in refused.stderr
