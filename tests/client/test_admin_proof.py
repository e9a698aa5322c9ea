"""The admin token of this machine's server: no command sends it anywhere, and a proof of it goes to that server
alone."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import commands
import pytest
from builders import ServerProcess, free_port, server_process, web
from websockets.sync.client import connect

from perfagent.endpoint.admin_proof import AdminProof
from perfagent.endpoint.local_server import LocalServer
from perfagent_client.client import AsyncClient, Client
from perfagent_server.security.proof_check import ProofCheck

pytestmark = pytest.mark.real

TOKEN = "the-admin-token-of-my-own-server"

ASKING = [
    ("delete", "nan", "--yes"), ("runs",), ("export", "nan"), ("stacks", "nan", "--wait", "1"),
    ("wait", "nan", "--until", "step=1"), ("compare", "a", "b"), ("report", "nan", "-o", "/dev/null"), ("keys", "list"),
    ("keys", "login"), ("users", "remove", "u"), ("channels", "test", "c"), ("alerts", "ack", "a"), ("silences", "list"),
    ("prices", "list"), ("retention", "preview"), ("diagnose", "nan"), ("sync",),
]  # fmt: skip
"""A command of each kind that asks a server."""


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[str]]]:
    """The address of a program of somebody else on this machine, which refuses everything, and what it was shown."""
    shown: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            shown.append(self.headers.get("Authorization", ""))
            self.send_response(401)
            self.end_headers()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = refuse  # noqa: N815 - as http.server calls them

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", shown
        http.shutdown()
        thread.join()


def own_data(folder: Path) -> LocalServer:
    """The data folder of a server, with its token."""
    data = folder / "data" / "perfagent"
    data.mkdir(parents=True)
    (data / "admin-token").write_text(TOKEN)
    return LocalServer(data)


@pytest.mark.parametrize("words", ASKING, ids=" ".join)
def test_stranger_on_this_machine_gets_the_given_key_or_nothing(
    stranger: tuple[str, list[str]], tmp_path: Path, words: tuple[str, ...]
) -> None:
    address, shown = stranger
    own_data(tmp_path).announce(f"http://127.0.0.1:{free_port()}")
    assert commands.perfagent(tmp_path, *words, PERFAGENT_SERVER=address).returncode != 0 or words == ("sync",)
    assert set(shown) <= {""}
    commands.perfagent(tmp_path, *words, PERFAGENT_SERVER=address, PERFAGENT_API_KEY="pfa_read_mine")
    assert set(shown) <= {"", "Bearer pfa_read_mine"} and (words == ("sync",) or shown[-1])


def test_whoever_took_a_dead_servers_port_is_asked_by_no_command(
    stranger: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, shown = stranger
    own_data(tmp_path).announce(address)
    said = tmp_path / "data" / "perfagent" / "address"
    said.write_text(said.read_text().replace("\n", "\n999999", 1))  # the process is gone
    for words in (("runs",), ("keys", "list"), ("delete", "nan", "--yes")):
        assert commands.perfagent(tmp_path, *words, PERFAGENT_API_KEY="pfa_admin_mine").returncode == 1
    assert shown == []


def test_stranger_is_sent_no_password_and_no_channel_address(
    stranger: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, shown = stranger
    for words in (
        ("users", "password", "ada", "--password-stdin"),
        ("channels", "add", "webhook", "http://127.0.0.1:1/x"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("correct horse battery"))
        ended = commands.perfagent(tmp_path, *words, PERFAGENT_SERVER=address)
        assert (ended.returncode, shown) == (1, []) and "administrator" in ended.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("own"), "--auth", "required") as running:
        yield running


def test_own_server_knows_its_administrator_without_the_token(server: ServerProcess) -> None:
    local = LocalServer(server.folder / "server-data")
    proof = local.proof_for(server.url)
    assert proof is not None
    sent = []
    with Client(server.url, proof) as client:
        client.http.event_hooks["request"].append(lambda request: sent.append(request.headers["authorization"]))
        assert client.request("GET", "/session", params={"run": "ü/?x"})["who"] == "admin token"
        assert "keys" in client.request("GET", "/keys")
        assert len(set(sent)) == 2 and server.admin_token not in "".join(sent)
        server.kill()
        server.start()
        assert client.request("GET", "/session")["who"] == "admin token", "after a restart, too"
    header = AsyncClient(server.url, proof).authorization("/ws/live")
    with connect(f"ws://127.0.0.1:{server.port}/ws/live", additional_headers=header, proxy=None) as live:
        live.send('{"subscribe": {"fleet": true, "names": []}}')
        live.ping().wait(10)
    others = ("localhost:{}", "127.0.0.1:1", "127.0.0.1:{}@evil.example", "10.0.0.1")
    assert [local.proof_for(f"http://{other.format(server.port)}") for other in others] == [None] * 4


def test_given_key_is_the_one_that_is_used_and_errors_say_so(server: ServerProcess, tmp_path: Path) -> None:
    key = server.admin("POST", "/keys", {"scope": "ingest", "name": "jobs"})["key"]
    data = {"PERFAGENT_DATA": str(server.folder / "server-data")}
    for words in (("keys", "list"), ("runs",), ("delete", "nan", "--yes")):
        assert commands.perfagent(tmp_path, *words, **data).returncode == (1 if words[0] == "delete" else 0)
        refused = commands.perfagent(tmp_path, *words, **data, PERFAGENT_API_KEY=key)
        assert refused.returncode == 1 and "unset it to act as this server's administrator" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


def test_a_proof_that_somebody_got_hold_of_is_worth_nothing(server: ServerProcess) -> None:
    local = LocalServer(server.folder / "server-data")
    proof = local.proof_for(server.url)
    assert proof is not None
    used = proof.header("GET", "/api/v1/keys")

    def status(header: str, path: str = "/keys", method: str = "GET") -> int:
        return web().request(method, f"{server.url}/api/v1{path}", headers={"Authorization": header}).status_code

    assert status(used) == 200
    assert status(used) == 401, "a second time"
    assert status(proof.header("GET", "/api/v1/keys"), "/users") == 401, "for something else"
    assert status(proof.header("GET", "/api/v1/keys"), "/keys/k", "DELETE") == 401
    said = (server.folder / "server-data" / "address").read_text()
    elsewhere = AdminProof(server.admin_token, lambda: said + "another start")
    assert status(elsewhere.header("GET", "/api/v1/keys")) == 401, "made for another server, or before it was restarted"
    assert status(proof.header("GET", "/api/v1/keys")) == 200


def test_a_proof_is_good_for_half_a_minute() -> None:
    now = [0.0]
    check = ProofCheck(TOKEN, "here", clock=lambda: now[0])
    made = AdminProof(TOKEN, lambda: "here").header("GET", "/x").removeprefix("Bearer ")
    at = int(made.partition(".")[0]) / 1000
    for late in (-31.0, 31.0):
        now[0] = at + late
        assert not check.admits(made, "GET", "/x")
    fresh = ProofCheck(TOKEN, "here", clock=lambda: at + 29.0)
    assert fresh.admits(made, "GET", "/x") and not fresh.admits(made, "GET", "/x")
