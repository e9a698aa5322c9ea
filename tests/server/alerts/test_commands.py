"""perfagent channels, against a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from api_builders import ADMIN_TOKEN, Listening, listening
from builders import Receiver, free_port, until
from commands import perfagent, perfagent_process
from preloaded import Ended
from standardwebhooks import Webhook

from perfagent.errors import ConfigError, PerfagentError
from perfagent_server.commands.connection import AdminApi


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


def test_a_channel_is_added_listed_tested_and_removed(server: Listening, receiver: Receiver, tmp_path: Path) -> None:
    assert "channels add webhook URL" in perfagent_process(tmp_path, "channels", "list", **where(server)).stdout
    added = channels(
        server, tmp_path, "add", "webhook", receiver.url, "--name", "pager", "--min-severity", "critical", "--json"
    )
    assert added.returncode == 0, added.stderr
    made = json.loads(added.stdout)
    assert made.keys() == {"id", "secret"}
    [listed] = json.loads(channels(server, tmp_path, "list", "--json").stdout)["channels"]
    assert (listed["id"], listed["name"], listed["min_severity"]) == (made["id"], "pager", "critical")
    text = channels(server, tmp_path, "list").stdout
    assert made["id"] in text and receiver.url in text and made["secret"] not in text
    tested = channels(server, tmp_path, "test", made["id"])
    assert (tested.returncode, tested.stdout) == (0, "arrived, the receiver answered 200\n")
    [got] = receiver.deliveries
    Webhook(made["secret"]).verify(got.body, got.headers)
    removed = channels(server, tmp_path, "remove", made["id"], "--json")
    assert json.loads(removed.stdout) == {"id": made["id"], "removed": True}
    again = channels(server, tmp_path, "remove", made["id"])
    assert again.returncode == 1
    assert made["id"] in again.stderr


def test_the_secret_is_printed_for_people_too(server: Listening, receiver: Receiver, tmp_path: Path) -> None:
    added = channels(server, tmp_path, "add", "webhook", receiver.url)
    assert added.returncode == 0, added.stderr
    first, second = added.stdout.splitlines()
    assert first.split()[0] == "channel"
    assert second.split()[1].startswith("whsec_")


def test_a_test_that_does_not_arrive_is_a_failure(tmp_path: Path) -> None:
    with Receiver(lambda _: 503) as failing, listening(tmp_path / "server", webhook_allow=(failing.address,)) as server:
        made = json.loads(channels(server, tmp_path, "add", "webhook", failing.url, "--json").stdout)
        tested = channels(server, tmp_path, "test", made["id"])
    assert tested.returncode == 1
    assert "503" in tested.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("add", "webhook", "http://127.0.0.1:9/hook"), 2, "PERFAGENT_WEBHOOK_ALLOW=127.0.0.1:9"),
        (("add", "webhook", "http://[::1]:9/hook"), 2, "PERFAGENT_WEBHOOK_ALLOW=[::1]:9"),
        (("add", "webhook", "example.com/hook"), 2, "http:// or https://"),
        (
            ("add", "webhook", "notaurl"),
            2,
            "http:// or https://, as https://example.com/hook; 'notaurl' begins with neither",
        ),
        (("add", "webhook", "ftp://example.com/hook"), 2, "not with 'ftp'"),
        (("remove", "nothing"), 1, "no channel 'nothing'; `perfagent channels list` lists them"),
        (("add", "pager", "https://example.com/"), 2, "webhook"),
        (("test", "nothing"), 1, "no channel 'nothing'"),
        (("add", "webhook"), 2, "URL"),
        ((), 2, "add|set|list|test|log|rotate|remove"),
    ],
)
def test_what_cannot_be_done_is_said(
    unchanged: Listening, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    ended = channels(unchanged, tmp_path, *arguments)
    assert ended.returncode == code, ended.stderr
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not arguments or len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("address", ["localhost:8420", "foo", "ftp://foo", "http://"])
def test_an_address_that_is_none_is_not_called_a_server_that_is_down(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="must begin with http:// or https://"):
        AdminApi(address, tmp_path)


@contextmanager
def another_program(kind: str, body: bytes) -> Iterator[str]:
    """The address of something that answers every request with this."""

    class Page(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = answer  # noqa: N815 - as http.server calls them

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as other:
        thread = threading.Thread(target=other.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()
        thread.join(5)


def test_an_answer_of_another_program_is_said_to_be_one(tmp_path: Path) -> None:
    with (
        another_program("text/html; charset=utf-8", b"<html>a notebook</html>") as url,
        pytest.raises(PerfagentError, match="is no perfagent server: it sent text/html"),
    ):
        AdminApi(url, tmp_path).request("GET", "/channels")


@pytest.mark.parametrize(
    "command",
    [
        "keys list", "keys login", "keys limit k", "users list", "users role u viewer", "channels list", "channels test c",
        "alerts list", "silences list", "prices list", "retention list",
    ],
)  # fmt: skip
def test_json_of_another_program_is_no_traceback(tmp_path: Path, command: str) -> None:
    with another_program("application/json", b'{"status": "ok"}') as url:
        ended = perfagent(tmp_path, *command.split(), "--server", url, PERFAGENT_API_KEY="k")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert url in ended.stderr and "does not answer like a perfagent server" in ended.stderr


def test_only_an_administrator_may_and_a_missing_server_is_said(unchanged: Listening, tmp_path: Path) -> None:
    nobody = channels(unchanged, tmp_path, "list", PERFAGENT_ADMIN_TOKEN="")
    assert nobody.returncode == 1
    assert "administrator" in nobody.stderr
    url = f"http://127.0.0.1:{free_port()}"
    gone = channels(unchanged, tmp_path, "list", "--server", url)
    assert gone.returncode == 1
    assert url in gone.stderr and "perfagent up" in gone.stderr


def nan(server: Listening) -> None:
    import httpx

    rows = [
        {"run": "sick", "step": 1, "metrics": {"loss": 2.0}},
        {"run": "sick", "step": 2, "metrics": {"loss": "NaN"}},
    ]
    httpx.post(f"{server.url}/api/v1/log", json=rows).raise_for_status()


def test_alerts_are_listed_acted_on_and_shown_with_their_history(server: Listening, tmp_path: Path) -> None:
    nan(server)

    def run(*arguments: str) -> Ended:
        done = perfagent(tmp_path, *arguments, **where(server))
        assert done.returncode == 0, done.stderr
        return done

    [alert] = until(lambda: json.loads(run("alerts", "list", "--state", "firing", "--json").stdout)["alerts"])
    ident = alert["id"]
    assert "The loss became NaN" in run("alerts", "list").stdout
    assert ident in run("alerts", "list", "--run", alert["run"]).stdout
    assert run("alerts", "list", "--project", "other").stdout == "no alerts\n"
    for act in ("ack", "unack", "mute", "unmute", "snooze", "unsnooze"):
        more = ("--for-s", "60") if act in ("mute", "snooze") else ()
        run("alerts", act, ident, "--note", f"a note on {act}", *more)
    shown = run("alerts", "show", ident).stdout
    assert "a note on snooze" in shown and "acknowledged" in shown
    run("alerts", "resolve", ident)
    made = json.loads(run("silences", "add", "--run", "sick", "--for-s", "60", "--note", "night", "--json").stdout)
    assert "run sick" in run("silences", "list").stdout
    run("silences", "remove", made["id"])


def test_a_channel_is_changed_back_and_a_change_of_nothing_is_refused(
    server: Listening, receiver: Receiver, tmp_path: Path
) -> None:
    ident = json.loads(
        channels(server, tmp_path, "add", "webhook", receiver.url, "--project", "a", "--summaries", "--json").stdout
    )["id"]
    assert channels(server, tmp_path, "set", ident, "--project", "", "--no-summaries").returncode == 0
    [shown] = json.loads(channels(server, tmp_path, "list", "--json").stdout)["channels"]
    assert (shown["projects"], shown["summaries"]) == ([], False)
    nothing = channels(server, tmp_path, "set", ident)
    assert (nothing.returncode, "nothing to change" in nothing.stderr) == (2, True)
    assert channels(server, tmp_path, "set", ident, "--repeat-s", "nan").returncode == 2


def test_no_option_of_a_command_takes_the_place_of_what_runs_it() -> None:
    import argparse
    from importlib.metadata import entry_points

    def all_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
        for action in parser._actions:
            yield action
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from all_of(inner)

    for entry in entry_points(group="perfagent.commands"):
        parser = argparse.ArgumentParser()
        entry.load()(parser)
        assert [action.option_strings for action in all_of(parser) if action.dest == "run"] == [], entry.name
