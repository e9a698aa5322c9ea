"""The ClickHouse engine (chdb) behind a small HTTP endpoint that speaks what clickhouse-connect needs, for tests and
benchmarks: a program of its own, since the engine takes signals and memory of the process that it lives in.

    python tests/clickhouse_engine.py FOLDER     prints the port it listens on; ends when its input ends

One request at a time. Settings and bound parameters are those of the request. Data of an INSERT comes in the body; the
engine has no input(), so it reads a file instead.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from chdb.session import Session

_OF_THE_PROTOCOL = {"query", "database", "session_id", "query_id", "client_protocol_version", "role"}
_OF_THE_SERVER = {"wait_end_of_query", "send_progress_in_http_headers", "http_headers_progress_interval_ms"}
_INPUT = re.compile(r"input\('([^']*)'\)(.*)FORMAT\s+(\w+)\s*$", re.DOTALL)
_lock = threading.Lock()


class Endpoint(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for head and body: else the kernel waits 40 ms for the client before it sends the body
    disable_nagle_algorithm = True
    session: Session
    applied: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        self._answer(200, b"Ok.\n")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunks()
        wanted = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        query, data = (wanted["query"], body) if "query" in wanted else (body.decode(), b"")
        parameters = {name[6:]: value for name, value in wanted.items() if name.startswith("param_")}
        settings = {
            name: value
            for name, value in wanted.items()
            if not name.startswith("param_") and name not in _OF_THE_PROTOCOL | _OF_THE_SERVER
        }
        try:
            with _lock:
                answer = self._run(query, data, parameters, settings)
        except Exception as error:
            found = re.search(r"Code: (\d+)", str(error))
            self._answer(500, str(error).encode(), {"X-ClickHouse-Exception-Code": found[1] if found else "1000"})
            return
        self._answer(200, answer)

    def _run(self, query: str, data: bytes, parameters: dict[str, str], settings: dict[str, str]) -> bytes:
        self._apply(settings)
        if not data:
            return self._ask(query, parameters)
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(data)
            file.flush()
            rewritten, changed = _INPUT.subn(rf"file('{file.name}', '\3', '\1')\2", query)
            if not changed:
                raise ValueError(f"this endpoint takes data for input() only: {query}")
            return self._ask(rewritten, parameters)

    def _apply(self, settings: dict[str, str]) -> None:
        """The session keeps them: a server needs no statement for settings, so most requests must not need one here."""
        for name in [name for name in self.applied if name not in settings]:
            self.session.query(f"SET {name} = DEFAULT")
            del self.applied[name]
        for name, value in settings.items():
            if self.applied.get(name) != value:
                self.session.query(f"SET {name} = {_literal(value)}")
                self.applied[name] = value

    def _ask(self, query: str, parameters: dict[str, str]) -> bytes:
        form = re.search(r"FORMAT\s+(\w+)\s*;?\s*$", query)
        text = query[: form.start()] if form else query
        kind = form[1] if form else self.headers.get("X-ClickHouse-Format") or "TabSeparated"
        found: Any = self.session.query(text, kind, params=parameters)
        return bytes(found.bytes()) if found is not None and found.size() else b""

    def _chunks(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return b""
        found = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"X-ClickHouse-Summary": "{}", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def _literal(value: str) -> str:
    return (
        value if re.fullmatch(r"-?\d+(\.\d+)?", value) else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    )


def main() -> None:
    Endpoint.session = Session(sys.argv[1])
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    server = ThreadingHTTPServer(("127.0.0.1", port), Endpoint)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # the engine's threads do not end by themselves


if __name__ == "__main__":
    main()
