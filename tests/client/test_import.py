"""`perfagent import` against a real server."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import commands
import event_files
import pytest
from api_builders import ADMIN_TOKEN, Listening, listening
from builders import Receiver, job_environment, until, web
from preloaded import Ended

from perfagent_client.history import OldRun, find_runs
from perfagent_client.importing.attempts import Attempts
from perfagent_client.importing.frames import run_id

pytestmark = pytest.mark.real

DATA = Path(__file__).parents[1] / "data"
FALLING = [2.5 * 0.99**step + 0.1 for step in range(200)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    with listening(tmp_path_factory.mktemp("server"), webhook_allow=("127.0.0.1/32",)) as running:
        yield running


def bring(server: Listening, folder: Path, *words: object) -> dict[str, Any]:
    ended = importing(server, folder, *words, "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def importing(server: Listening, folder: Path, *words: object) -> Ended:
    key = {"PERFAGENT_SERVER": server.url, "PERFAGENT_ADMIN_TOKEN": ADMIN_TOKEN}
    return commands.perfagent(folder / "job", "import", *map(str, words), **key)


def get(server: Listening, path: str, **query: Any) -> Any:
    answer = web().get(f"{server.url}/api/v1{path}", params=query)
    answer.raise_for_status()
    return answer.json()


def stored(server: Listening, run: str) -> dict[str, list[tuple[int, str]]]:
    """What is visible of each series; values as their text, for NaN."""
    found: dict[str, list[tuple[int, str]]] = {}
    answer = web().get(f"{server.url}/api/v1/runs/{run}/export", params={"format": "jsonl"})
    for line in answer.text.splitlines():
        one = json.loads(line)
        found.setdefault(one["name"], []).append((one["step"], repr(float(one["value"]))))
    return {name: sorted(samples) for name, samples in found.items()}


def visible(run: OldRun) -> dict[str, list[tuple[int, str]]]:
    """What a server shows of a run that was started once."""
    series = {name: samples for name, samples in run.series.items() if len(samples)}
    assert not series or Attempts(series).count == 1
    return {
        name: sorted((step, repr(value)) for step, value in zip(samples.step, samples.value, strict=True))
        for name, samples in series.items()
    }


def test_each_format_is_there_to_the_bit(server, tmp_path):
    folders = [one for one in sorted((DATA / "history").iterdir()) if one.is_dir()]
    bring(server, tmp_path, *folders, "--project", "formats")
    formats = set()
    for source in find_runs(folders):
        for run in source.read():
            if run.name in ("tensorboard-torch-2.13/restarted", "lightning"):
                continue  # started again: the next test
            formats.add(source.format)
            assert stored(server, run_id(run, "formats")) == visible(run), (source.format, run.name)
    assert {"tensorboard", "wandb", "trackio", "neptune", "trainer_state", "table", "printed"} <= formats


def test_name_group_tags_notes_config_and_times_are_kept(server, tmp_path):
    [run] = [
        run
        for source in find_runs([DATA / "history" / "wandb-0.31"])
        for run in source.read()
        if run.name == "baseline"
    ]
    bring(server, tmp_path, DATA / "history" / "wandb-0.31")
    shown = get(server, f"/runs/{run_id(run, run.project)}")
    assert (shown["name"], shown["project"], shown["group"]) == ("baseline", run.project, run.group)
    assert run.config.items() <= shown["config"].items() and run.tags == shown["tags"] and run.notes == shown["notes"]
    assert shown["started"][:19] == time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(run.started))
    assert (shown["state"], shown["ended"][:16]) == (
        "finished",
        time.strftime("%Y-%m-%dT%H:%M", time.gmtime(run.ended)),
    )
    imported = shown["meta"]["imported"]
    assert (imported["format"], imported["source"]) == ("wandb", run.source)
    assert any("no numbers" in sentence for sentence in imported["left_out"])


def test_what_was_started_again_hides_what_came_before(server, tmp_path):
    first, second = (
        event_files.events({"loss": FALLING[:100]}),
        event_files.events({"loss": [1.0] * 90}, first=61, began=1.8e9),
    )
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "a.tfevents.1").write_bytes(first + second)
    [told] = bring(server, tmp_path, tmp_path / "again")["runs"]
    loss = stored(server, told["run"])["loss"]
    assert [step for step, _ in loss] == list(range(1, 151)), "150 steps, each once"
    assert {value for step, value in loss if step > 60} == {"1.0"}
    assert get(server, f"/runs/{told['run']}")["attempts"] == 2


def test_the_same_again_adds_nothing_and_growth_only_itself(server, tmp_path):
    file = event_files.write(tmp_path / "grows", {"loss": FALLING[:120], "lr": [0.1] * 120})
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    first = bring(server, tmp_path, tmp_path / "grows")
    [run] = [one["run"] for one in first["runs"]]
    assert first["samples"] == 239, "the last one is cut"
    again = bring(server, tmp_path, tmp_path / "grows")
    assert (again["samples"], again["imports"]) == (0, [])
    file.write_bytes(whole + event_files.events({"loss": FALLING[120:], "lr": [0.1] * 80}, first=121))
    grown = bring(server, tmp_path, tmp_path / "grows")
    assert (grown["samples"], grown["imports"]) == (161, first["imports"])
    assert get(server, f"/runs/{run}")["ended"].startswith("2023-11-14T22:16:40"), "step 200"
    assert [len(samples) for samples in stored(server, run).values()] == [200, 200]


def test_nobody_is_alerted_of_the_past(server, tmp_path):
    with Receiver() as receiver:
        channel = {"name": "all", "kind": "webhook", "url": receiver.url, "min_severity": "info"}
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        web().post(f"{server.url}/api/v1/channels", json=channel, headers=headers).raise_for_status()
        event_files.write(tmp_path / "nan", {"train/loss": [*FALLING[:150], math.nan, math.nan]})
        [told] = bring(server, tmp_path, tmp_path / "nan")["runs"]
        assert "NaN" in told["verdict"] and told["severity"] == "critical"
        [alert] = [one for one in get(server, "/alerts", run=told["run"])["alerts"] if one["rule"] == "nonfinite_loss"]
        assert (alert["state"], alert["since_step"]) == ("resolved", 151)
        assert alert["since"].startswith("2023-11-14T22:15"), "when it was, not when it came here"
        verdict = get(server, f"/runs/{told['run']}/verdict")
        assert (verdict["rule"], verdict["severity"]) == ("nonfinite_loss", "critical")

        def outcome() -> str | None:
            rows = get(server, "/runs", **{"with": "verdict", "limit": 200})["runs"]
            return next((row["severity"] for row in rows if row["run"] == told["run"]), None)

        until(lambda: outcome() == "critical", within_s=30, every_s=0.2, why=f"it is {outcome()}")
        attention = get(server, "/runs", **{"with": "verdict", "attention": "true"})["runs"]
        assert told["run"] not in [row["run"] for row in attention]
        assert get(server, "/deliveries")["deliveries"] == [] and not receiver.deliveries


def test_the_rules_of_the_server_judge(server, tmp_path):
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    off = web().put(f"{server.url}/api/v1/rules/nonfinite_loss?project=calm", json={"enabled": False}, headers=headers)
    off.raise_for_status()
    own = {"name": "high", "metric": "loss", "comparison": ">", "threshold": 2.0, "for_steps": 1}
    web().post(f"{server.url}/api/v1/rules/alerts?project=calm", json=own, headers=headers).raise_for_status()
    event_files.write(tmp_path / "calm", {"loss": [*FALLING, math.nan]})
    [told] = bring(server, tmp_path, tmp_path / "calm", "--project", "calm")["runs"]
    rules = {one["rule"] for one in get(server, "/alerts", run=told["run"])["alerts"]}
    assert "nonfinite_loss" not in rules and any("high" in rule for rule in rules)


def test_an_import_is_taken_back_as_a_whole(server, tmp_path):
    for name in ("a", "b", "c"):
        event_files.write(tmp_path / "back" / name, {"loss": FALLING})
    brought = bring(server, tmp_path, tmp_path / "back", "--project", "back")
    [import_id] = brought["imports"]
    assert import_id in importing(server, tmp_path, "--list").stdout
    unasked = importing(server, tmp_path, "--undo", import_id)
    assert unasked.returncode == 2 and "--yes" in unasked.stderr
    undone = importing(server, tmp_path, "--undo", import_id, "--yes")
    assert undone.stdout == "3 runs deleted\n", undone.stderr
    assert get(server, "/runs", project="back")["runs"] == []
    assert import_id not in importing(server, tmp_path, "--list").stdout
    audit = (
        web().get(f"{server.url}/api/v1/audit", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}).json()["entries"]
    )
    actions = [(row["action"], row["thing"]) for row in audit]
    assert ("import.delete", import_id) in actions and {("run.delete", one["run"]) for one in brought["runs"]} <= set(
        actions
    )
    assert bring(server, tmp_path, tmp_path / "back", "--project", "back")["samples"] == 600, "and may come again"
    unknown = importing(server, tmp_path, "--undo", "im_000000000000", "--yes")
    assert unknown.returncode == 1 and "--list" in unknown.stderr


def test_secrets_stay_at_home(server, tmp_path):
    event_files.write(tmp_path / "secret", {"loss": FALLING})
    (tmp_path / "secret" / "hparams.yaml").write_text("lr: 0.5\napi_key: hunter2hunter2\n")
    [told] = bring(server, tmp_path, tmp_path / "secret")["runs"]
    config = get(server, f"/runs/{told['run']}")["config"]
    assert config["lr"] == 0.5 and "hunter2" not in json.dumps(config) and "api_key" in config


def test_what_its_agent_has_sent_is_not_brought_again(server, tmp_path, monkeypatch):
    script = (
        "import perfagent\nrun = perfagent.init(name='mine', record='recorded')\n"
        "for step in range(30): run.log({'loss': 1.0 / (step + 1)}, step=step)\nrun.finish()\n"
    )
    folder = tmp_path / "job"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", script], cwd=folder, env=job_environment(folder), check=True, timeout=120)
    [copy] = bring(server, tmp_path, folder / "recorded", "--project", "copies")["runs"]
    assert len(stored(server, copy["run"])["loss"]) == 30
    synced = commands.perfagent(folder, "sync", str(folder / "recorded"), PERFAGENT_SERVER=server.url)
    assert synced.returncode == 0, synced.stderr
    [left] = bring(server, tmp_path, folder / "recorded", "--project", "others")["runs"]
    assert "already" in left["problem"] and get(server, "/runs", project="others")["runs"] == []


def test_wrong_use_says_what_to_do(server, tmp_path):
    for words, said in (
        (("--list", "--undo", "x"), "--undo IMPORT"),
        ((), "files, folders"),
        ((tmp_path / "none",), "no file"),
    ):
        ended = importing(server, tmp_path, *words)
        assert ended.returncode == 2 and said in ended.stderr
    (tmp_path / "empty").mkdir()
    nothing = importing(server, tmp_path, tmp_path / "empty")
    assert nothing.returncode == 1 and "found no run" in nothing.stderr


def test_an_import_of_others_may_not_be_gone_on_with(server):
    def begin(key: str) -> int:
        path = f"{server.url}/api/v1/imports/im_0123456789ab"
        return web().put(path, json={"origin": "here"}, headers={"Authorization": f"Bearer {key}"}).status_code

    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    made = [
        web().post(f"{server.url}/api/v1/keys", json={"scope": "ingest", "name": name}, headers=headers)
        for name in "ab"
    ]
    first, second = (one.json()["key"] for one in made)
    assert [begin(first), begin(first), begin(second)] == [204, 204, 409]


def test_follow_brings_what_is_added_and_alerts_of_it(server, tmp_path):
    file = event_files.write(tmp_path / "live" / "one", {"loss": FALLING[:60]}, began=time.time() - 60)
    log = tmp_path / "followed.log"
    command = [sys.executable, "-m", "perfagent", "import", str(tmp_path / "live"), "--follow", "--project", "live"]
    environment = job_environment(tmp_path / "job", PERFAGENT_SERVER=server.url)
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            until(lambda: get(server, "/runs", project="live")["runs"], within_s=60, every_s=0.2, why=log.read_text())
            [run] = [row["run"] for row in get(server, "/runs", project="live")["runs"]]
            until(lambda: len(stored(server, run).get("loss", ())) == 60, within_s=30, every_s=0.2)
            assert get(server, f"/runs/{run}")["state"] == "running"
            with file.open("ab") as opened:
                opened.write(event_files.events({"loss": [math.nan] * 3}, first=61, began=time.time() - 60))
            alerts = until(
                lambda: get(server, "/alerts", run=run)["alerts"], within_s=60, every_s=0.2, why=log.read_text()
            )
            assert (alerts[0]["rule"], alerts[0]["state"]) == ("nonfinite_loss", "firing"), "a run that goes on is live"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0, log.read_text()
        finally:
            process.kill()
    assert len(stored(server, run)["loss"]) == 63
    assert bring(server, tmp_path, tmp_path / "live", "--project", "live")["samples"] == 0
    assert get(server, f"/runs/{run}")["state"] == "finished", "who imports it without --follow says that it has ended"


@pytest.mark.long
@pytest.mark.fault
def test_twenty_kills_lose_and_double_nothing(server, tmp_path):
    """Of the whole command with its processes, each at another moment."""
    for number in range(40):
        values = [value + number for value in FALLING * 20]
        event_files.write(tmp_path / "killed" / f"run{number:02}", {"train/loss": values, "lr": [0.1] * 4000})
    command = [sys.executable, "-m", "perfagent", "import", str(tmp_path / "killed"), "--project", "killed"]
    environment = job_environment(tmp_path / "job", PERFAGENT_SERVER=server.url)
    for kill in range(20):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.05 * (kill % 5))
            commands.os.killpg(process.pid, signal.SIGKILL)
    bring(server, tmp_path, tmp_path / "killed", "--project", "killed")
    runs = [run for source in find_runs([tmp_path / "killed"]) for run in source.read()]
    assert len(get(server, "/runs", project="killed", limit=100)["runs"]) == len(runs) == 40
    for run in runs:
        assert stored(server, run_id(run, "killed")) == visible(run)
