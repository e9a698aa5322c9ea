"""From an alert to a script, or to an agent: runs a command once for each message that fires, with the message on its input.

PERFAGENT_WEBHOOK_ALLOW=127.0.0.1:9001 perfagent up
perfagent channels add webhook http://127.0.0.1:9001/        # prints the secret
python examples/alert_to_script.py whsec_... 9001 handled.sqlite python my_script.py

A message is written down under its webhook-id before it is answered, so the same message again starts nothing. A command
that was under way when this receiver was killed is started again; WEBHOOK_ID in its environment tells it that it was.
"""

import base64
import hashlib
import hmac
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

TOLERANCE_S = 5 * 60  # an older message may be a replay
KEY = base64.b64decode(sys.argv[1].removeprefix("whsec_"))
PORT, FILE, COMMAND = int(sys.argv[2]), sys.argv[3], sys.argv[4:]
bell = threading.Event()


def connect() -> sqlite3.Connection:
    connection = sqlite3.connect(FILE, isolation_level=None)
    connection.execute("CREATE TABLE IF NOT EXISTS message (id TEXT PRIMARY KEY, body BLOB, done INTEGER DEFAULT 0)")
    return connection


def verified(headers, body: bytes) -> bool:
    message_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > TOLERANCE_S:
        return False
    expected = base64.b64encode(hmac.new(KEY, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest())
    parts = headers.get("webhook-signature", "").split()
    return any(hmac.compare_digest(expected, part.removeprefix("v1,").encode()) for part in parts)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        good = verified(self.headers, body)
        if good and json.loads(body)["type"] == "alert.firing":
            connect().execute(
                "INSERT OR IGNORE INTO message (id, body) VALUES (?, ?)", (self.headers["webhook-id"], body)
            )
            bell.set()
        self.send_response(204 if good else 401)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


def work() -> None:
    """One command after the other."""
    connection = connect()
    while True:
        for message_id, body in connection.execute("SELECT id, body FROM message WHERE NOT done").fetchall():
            ended = subprocess.run(COMMAND, input=body, env=os.environ | {"WEBHOOK_ID": message_id}, check=False)
            connection.execute("UPDATE message SET done = 1 WHERE id = ?", (message_id,))
            print(message_id, "ended with", ended.returncode, flush=True)
        bell.wait(10)
        bell.clear()


threading.Thread(target=work, daemon=True).start()
HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
