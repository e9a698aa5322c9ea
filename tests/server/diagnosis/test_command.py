"""perfagent diagnose: files, folders, recordings and runs of a server; its output and exit codes."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from api_builders import ADMIN_TOKEN, Listening, listening
from builders import free_port
from code_scanning import assert_shown
from commands import perfagent
from preloaded import Ended
from ticks import tick_of

from perfagent.delivery.spool import Header, Spool
from perfagent.wire import Event, Frame, Group, encode
from perfagent_client.client import Client

pytestmark = pytest.mark.real

HISTORY = Path(__file__).parents[2] / "data" / "history"
START = 1_700_000_000.0
FIELDS = ["rule", "severity", "onset_step", "first_step", "last_step"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("diagnose")) as running:
        yield running


def diagnose(folder: Path, *words: object, **env: str) -> Ended:
    return perfagent(folder, "diagnose", *map(str, words), **env)


def runs(ended: Ended) -> list[dict[str, Any]]:
    assert ended.returncode in (0, 1, 3), ended.stderr
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
        spool.append(*tick_of([Group(steps, times, times, {"loss": piece})], [] if part else [began]), now=60.0 * part)
        spool.hold(now=60.0 * part + 61)
    spool.close()


def test_file_is_judged_and_printed_as_json(tmp_path: Path) -> None:
    path = with_nan(tmp_path / "curve.csv")
    ended = diagnose(tmp_path, path, "--json")
    [run] = runs(ended)
    assert ended.returncode == 1
    assert (run["name"], run["path"], run["format"], run["steps"], run["outcome"]) == (
        "curve",
        str(path),
        "table",
        60,
        "finding",
    )
    [finding] = run["findings"]
    assert [finding[name] for name in FIELDS] == ["nonfinite_loss", "critical", 30, 30, 30]
    assert "NaN in step 30" in finding["message"] and finding["fix"]
    assert run["verdict"]["rule"] == "nonfinite_loss" and run["verdict"]["evidence"]
    assert "errors of GPUs and links" in run["not_judged"] and run["left_out"] == []


def test_people_get_the_verdict_of_each_run(tmp_path: Path) -> None:
    with_nan(tmp_path / "a.csv")
    with_nan(tmp_path / "b.csv", at=999)
    ended = diagnose(tmp_path, tmp_path)
    assert (ended.returncode, ended.stderr) == (1, "")
    lines = ended.stdout.splitlines()
    assert lines[0] == f"a: 60 steps (table, {tmp_path / 'a.csv'})"
    assert lines[1] == "  critical  nonfinite_loss" and lines[3].startswith("    Fix: ")
    assert f"b: 60 steps (table, {tmp_path / 'b.csv'})" in lines
    assert lines[-1] == "2 runs: 1 with findings, 1 without, 0 not judged"
    [lacking] = [line for line in lines if line.startswith("Not judged")]
    assert lacking.startswith("Not judged in all 2 runs, for want of data: ") and "errors of GPUs and links" in lacking
    [alone] = [line for line in diagnose(tmp_path, tmp_path / "a.csv").stdout.splitlines() if "Not judged" in line]
    assert alone.startswith("    Not judged, for want of data: ")


def test_exit_code_says_what_came_out(tmp_path: Path) -> None:
    few = tmp_path / "few.csv"
    few.write_text("step,loss\n1,2\n2,1\n")
    (tmp_path / "notes.txt").write_text("nothing of a training\n")
    well = with_nan(tmp_path / "well.csv", at=999)
    for words, code in (
        ([well], 0),
        ([with_nan(tmp_path / "ill.csv"), few], 1),
        ([few], 3),
        ([tmp_path / "notes.txt"], 3),
    ):
        assert diagnose(tmp_path, *words).returncode == code, words


def test_reports_for_code_hosts_and_ci(tmp_path: Path) -> None:
    with_nan(tmp_path / "a.csv")
    with_nan(tmp_path / "b.csv", at=999)
    sarif, junit = tmp_path / "found.sarif", tmp_path / "found.xml"
    assert diagnose(tmp_path, tmp_path, "--sarif", sarif, "--junit", junit).returncode == 1
    [result] = assert_shown(json.loads(sarif.read_text()))
    assert (result["ruleId"], result["level"]) == ("nonfinite_loss", "error")
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == (tmp_path / "a.csv").as_uri()
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    assert [case.find("failure") is not None for case in suite] == [True, False]


def test_thresholds_of_a_file_count_and_rules_can_be_off(tmp_path: Path) -> None:
    curve = tmp_path / "step.csv"  # up by less than the rule's own threshold of 4 %
    draw = random.Random(1)
    losses = [3.0 + draw.gauss(0, 0.01) + 0.1 * (step > 300) for step in range(1, 401)]
    curve.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses, start=1)))
    rules = tmp_path / "rules.toml"
    [run] = runs(diagnose(tmp_path, curve, "--json"))
    assert "loss_spike" not in {found["rule"] for found in run["findings"]}
    rules.write_text("[loss_spike]\nrise_pct = 1.0\n")
    [run] = runs(diagnose(tmp_path, curve, "--rules", rules, "--json"))
    assert "loss_spike" in {found["rule"] for found in run["findings"]}
    rules.write_text("[nonfinite_loss]\nenabled = false\n")
    [run] = runs(diagnose(tmp_path, with_nan(tmp_path / "curve.csv"), "--rules", rules, "--json"))
    assert run["findings"] == []


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
    ended = diagnose(tmp_path, with_nan(tmp_path / "curve.csv"), "--rules", path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in one_line(ended.stderr)


def test_a_recording_is_judged_over_its_ranks_and_left_as_it_was(tmp_path: Path) -> None:
    """Also beside the process that still writes it; several runs in it are judged apart."""
    folder = tmp_path / "recorded"
    recording(folder, [1.0] * 100, rank=0)
    recording(folder, [1.0] * 70 + [math.nan] + [1.0] * 29, rank=1)
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    spool = Spool.open(folder / ("0" * 32), recording=True)
    [run] = runs(diagnose(tmp_path, folder, "--json"))
    spool.abandon()
    assert (run["name"], run["format"], run["steps"]) == ("night", "recording", 100)
    [alert] = run["findings"]
    assert (alert["rule"], alert["onset_step"], "on rank 1" in alert["message"]) == ("nonfinite_loss", 71, True)
    assert 71 <= alert["first_step"] <= 72
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before
    recording(folder, [1.0] * 20, rank=2, run="two")
    found = runs(diagnose(tmp_path, folder, "--json"))
    assert [(one["source"], one["steps"]) for one in found] == [("perfagent:rec", 100), ("perfagent:two", 20)]


def test_damaged_recording_is_judged_as_far_as_whole(tmp_path: Path) -> None:
    recording(tmp_path / "recorded", [1.0] * 60)
    [path] = (tmp_path / "recorded").glob("*/*.frames")
    data = bytearray(path.read_bytes())
    data[-20] ^= 0xFF
    path.write_bytes(data)
    [run] = runs(diagnose(tmp_path, tmp_path / "recorded", "--json"))
    assert (run["steps"], run["outcome"], run["left_out"]) == (
        40,
        "nothing found",
        ["1 file damaged; what is whole in it was read"],
    )


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
        [run] = runs(diagnose(tmp_path, word, "--json", **where))
        assert (run["name"], run["format"], run["steps"]) == (word, "server", 40)
        assert [(one["rule"], one["first_step"]) for one in run["findings"]] == [("nonfinite_loss", 31)]
    path = tmp_path / "samples.csv"
    assert perfagent(tmp_path, "export", "run-a", "--format", "csv", "-o", str(path), **where).returncode == 0
    [by_file] = runs(diagnose(tmp_path, path, "--json"))
    assert by_file["findings"] == run["findings"]
    send(server, [1.0] * 25, run="run-a", name="a run/with a name", attempt=2, begin=21)
    [run] = runs(diagnose(tmp_path, "run-a", "--json", **where))
    assert (run["steps"], run["findings"]) == (45, []), "what lies at or after the new start is cut from view"


def test_own_trouble_is_no_finding_and_hides_no_run(tmp_path: Path) -> None:
    well, ill = with_nan(tmp_path / "well.csv", at=999), with_nan(tmp_path / "ill.csv")
    away = {"PERFAGENT_SERVER": f"http://127.0.0.1:{free_port()}"}
    database = f"postgresql://me:secret@127.0.0.1:{free_port()}/mlflow"
    for words, code, judged in (
        ([well, "--junit", tmp_path / "no" / "x.xml"], 3, 1),
        ([database], 3, 0),
        (["s3://bucket/mlflow"], 2, 0),
        ([well, database, "no-such-run"], 3, 1),
        (["no-such-run", ill], 1, 1),
        ([ill, "gone.csv"], 2, 0),
    ):
        ended = diagnose(tmp_path, *words, "--json", **away)
        assert ended.returncode == code, ended
        assert ended.stderr.startswith("perfagent diagnose: ") and "secret" not in ended.stderr
        assert len(json.loads(ended.stdout)["runs"] if ended.stdout else []) == judged


def test_database_is_read_by_its_address(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_bytes(gzip.decompress((HISTORY / "mlflow-3.17" / "mlflow.db.gz").read_bytes()))
    by_file, by_address = (runs(diagnose(tmp_path, word, "--json")) for word in (path, f"sqlite:///{path}"))
    assert len(by_file) > 1
    assert [one["findings"] for one in by_address] == [one["findings"] for one in by_file]
    assert {(one["format"], one["path"]) for one in by_address} == {("mlflow", f"sqlite:///{path}")}


def test_what_is_not_there_is_told_in_a_line(server: Listening, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    where = {"PERFAGENT_SERVER": server.url}
    for words, code, said in (
        (["none.csv"], 2, "there is no file or folder none.csv"),
        (["./some/folder"], 2, "there is no file or folder ./some/folder"),
        ([empty], 3, "found no run in"),
        (["no-such-run"], 3, "there is no file, no folder and no run 'no-such-run'"),
    ):
        ended = diagnose(tmp_path, *words, **where)
        assert (ended.returncode, ended.stdout) == (code, ""), ended
        assert said in one_line(ended.stderr)
    away = diagnose(tmp_path, "no-such-run", PERFAGENT_SERVER=f"http://127.0.0.1:{free_port()}")
    assert away.returncode == 3
    assert "no file or folder 'no-such-run', and as a run: the server" in one_line(away.stderr)
