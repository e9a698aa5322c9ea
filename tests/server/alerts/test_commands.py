"""perfagent channels, alerts and silences, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_builders import ADMIN_TOKEN, Listening, listening
from builders import Receiver, free_port, until, web
from commands import perfagent, perfagent_process
from preloaded import Ended
from standardwebhooks import Webhook

from perfagent.errors import ConfigError
from perfagent_server.commands.connection import AdminApi

pytestmark = pytest.mark.real


@pytest.fixture
def server(tmp_path: Path, receiver: Receiver) -> Iterator[Listening]:
    with listening(tmp_path / "server", webhook_allow=(receiver.address,)) as running:
        yield running


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    """A server for what is refused: no test adds a channel to it."""
    with listening(tmp_path_factory.mktemp("unchanged")) as running:
        yield running


def where(server: Listening) -> dict[str, str]:
    return {"PERFAGENT_SERVER": server.url, "PERFAGENT_ADMIN_TOKEN": ADMIN_TOKEN}


def channels(server: Listening, folder: Path, *arguments: str, **env: str) -> Ended:
    return perfagent(folder, "channels", *arguments, **(where(server) | env))


def test_a_channel_is_added_listed_changed_tested_and_removed(
    server: Listening, receiver: Receiver, tmp_path: Path
) -> None:
    def run(*arguments: str) -> str:
        ended = channels(server, tmp_path, *arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "channels add webhook URL" in perfagent_process(tmp_path, "channels", "list", **where(server)).stdout
    made = json.loads(run("add", "webhook", receiver.url, "--name", "pager", "--project", "a", "--summaries", "--json"))
    assert made.keys() == {"id", "secret"}
    ident = made["id"]
    run("set", ident, "--project", "", "--no-summaries", "--min-severity", "critical")
    [listed] = json.loads(run("list", "--json"))["channels"]
    assert [listed[name] for name in ("id", "name", "min_severity", "projects", "summaries")] == [
        ident, "pager", "critical", [], False,
    ]  # fmt: skip
    text = run("list")
    assert ident in text and receiver.url in text and made["secret"] not in text
    assert run("test", ident) == "arrived, the receiver answered 200\n"
    [got] = receiver.deliveries
    Webhook(made["secret"]).verify(got.body, got.headers)
    for wrong in (["set", ident], ["set", ident, "--repeat-s", "nan"]):
        assert channels(server, tmp_path, *wrong).returncode == 2
    assert json.loads(run("remove", ident, "--json")) == {"id": ident, "removed": True}
    again = channels(server, tmp_path, "remove", ident)
    assert (again.returncode, ident in again.stderr) == (1, True)
    first, second = run("add", "webhook", receiver.url).splitlines()
    assert (first.split()[0], second.split()[1][:6]) == ("channel", "whsec_"), "people see the secret, too"


def test_a_test_that_does_not_arrive_is_a_failure(tmp_path: Path) -> None:
    with Receiver(lambda _: 503) as failing, listening(tmp_path / "server", webhook_allow=(failing.address,)) as server:
        made = json.loads(channels(server, tmp_path, "add", "webhook", failing.url, "--json").stdout)
        tested = channels(server, tmp_path, "test", made["id"])
    assert (tested.returncode, "503" in tested.stdout) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("add webhook http://127.0.0.1:9/hook", 2, "PERFAGENT_WEBHOOK_ALLOW=127.0.0.1:9"),
        ("add webhook notaurl", 2, "http:// or https://, as https://example.com/hook; 'notaurl' begins with neither"),
        ("add pager https://example.com/", 2, "webhook"),
        ("add webhook", 2, "URL"),
        ("remove nothing", 1, "no channel 'nothing'; `perfagent channels list` lists them"),
        ("", 2, "add|set|list|test|log|rotate|remove"),
    ],
)
def test_what_cannot_be_done_is_said(
    unchanged: Listening, tmp_path: Path, arguments: str, code: int, says: str
) -> None:
    ended = channels(unchanged, tmp_path, *arguments.split())
    assert ended.returncode == code, ended.stderr
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not arguments or len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("address", ["localhost:8420", "foo", "ftp://foo", "http://"])
def test_wrong_address_is_not_called_a_server_that_is_down(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="must begin with http:// or https://"):
        AdminApi(address, tmp_path)


def test_only_an_administrator_may_and_a_missing_server_is_said(unchanged: Listening, tmp_path: Path) -> None:
    nobody = channels(unchanged, tmp_path, "list", PERFAGENT_ADMIN_TOKEN="")
    assert (nobody.returncode, "administrator" in nobody.stderr) == (1, True)
    url = f"http://127.0.0.1:{free_port()}"
    gone = channels(unchanged, tmp_path, "list", "--server", url)
    assert gone.returncode == 1
    assert url in gone.stderr and "perfagent up" in gone.stderr


def test_alerts_are_listed_acted_on_and_shown_with_their_history(server: Listening, tmp_path: Path) -> None:
    rows = [{"run": "sick", "step": step, "metrics": {"loss": loss}} for step, loss in ((1, 2.0), (2, "NaN"))]
    web().post(f"{server.url}/api/v1/log", json=rows).raise_for_status()

    def run(*arguments: str) -> str:
        done = perfagent(tmp_path, *arguments, **where(server))
        assert done.returncode == 0, done.stderr
        return done.stdout

    [alert] = until(lambda: json.loads(run("alerts", "list", "--state", "firing", "--json"))["alerts"])
    ident = alert["id"]
    assert "The loss became NaN" in run("alerts", "list")
    assert ident in run("alerts", "list", "--run", alert["run"])
    assert run("alerts", "list", "--project", "other") == "no alerts\n"
    for act in ("ack", "unack", "mute", "unmute", "snooze", "unsnooze"):
        more = ("--for-s", "60") if act in ("mute", "snooze") else ()
        run("alerts", act, ident, "--note", f"a note on {act}", *more)
    shown = run("alerts", "show", ident)
    assert "a note on snooze" in shown and "acknowledged" in shown
    run("alerts", "resolve", ident)
    made = json.loads(run("silences", "add", "--run", "sick", "--for-s", "60", "--note", "night", "--json"))
    assert "run sick" in run("silences", "list")
    run("silences", "remove", made["id"])
