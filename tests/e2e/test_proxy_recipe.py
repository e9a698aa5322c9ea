"""The nginx recipe for several servers (docs/replicas.md) repeats what may be repeated, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from builders import free_port, until

ROOT = Path(__file__).resolve().parents[2]
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")


@contextmanager
def refusing(seen: list[str]) -> Iterator[int]:
    """A server that notes each request and answers 503."""

    class Refuse(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append(f"{self.command} {self.path}")
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET  # noqa: N815 - the library's name

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def config(folder: Path, port: int, servers: list[int]) -> Path:
    """The recipe, at these ports and without TLS."""
    text = (ROOT / "docs" / "replicas.md").read_text("utf-8")
    [recipe] = re.findall(r"```nginx\n(.*?)```", text, re.DOTALL)
    for number, backend in enumerate(servers, start=11):
        recipe = recipe.replace(f"10.0.0.{number}:8420 max_fails=1", f"127.0.0.1:{backend} max_fails=0")
    recipe = re.sub(r"ssl_certificate.*;", "", recipe).replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;\n{recipe}}}\n"
    )
    return file


@pytest.mark.skipif(NGINX is None, reason="nginx is not here")
def test_only_frames_are_sent_again_to_another_server(tmp_path: Path) -> None:
    seen: list[str] = []
    port = free_port()
    with ExitStack() as stack:
        servers = [stack.enter_context(refusing(seen)) for _ in range(2)]
        command = [str(NGINX), "-e", "stderr", "-p", str(tmp_path), "-c", str(config(tmp_path, port, servers))]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            until(lambda: answers(client), why=(tmp_path / "log").read_text())
            seen.clear()
            for method, path in (("POST", "/api/v1/ingest"), ("POST", "/api/v1/keys"), ("GET", "/api/v1/runs")):
                assert client.request(method, path, content=b"x").status_code == 503
    assert sorted(seen) == [
        "GET /api/v1/runs", "GET /api/v1/runs", "POST /api/v1/ingest", "POST /api/v1/ingest", "POST /api/v1/keys",
    ]  # fmt: skip


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 503
    except httpx.TransportError:
        return False
