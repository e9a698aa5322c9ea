"""A webhook receiver that verifies perfagent's signatures, with nothing but the standard library.

PERFAGENT_WEBHOOK_ALLOW=127.0.0.1:9000 perfagent up          # a receiver on this machine must be allowed by name
perfagent channels add webhook http://127.0.0.1:9000/        # prints the secret
python examples/receive_webhook.py whsec_... [PORT]
"""

import base64
import hashlib
import hmac
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

TOLERANCE_S = 5 * 60  # an older message may be a replay
SECRET = base64.b64decode(sys.argv[1].removeprefix("whsec_"))
seen: set[str] = set()


def verified(headers, body: bytes) -> bool:
    """The Standard Webhooks rule: HMAC-SHA256 over `id.timestamp.body`, any of the signatures in the header."""
    message_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not timestamp.isdecimal() or abs(time.time() - int(timestamp)) > TOLERANCE_S:
        return False
    expected = base64.b64encode(hmac.new(SECRET, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest())
    parts = headers.get("webhook-signature", "").split()
    signatures = [part.removeprefix("v1,").encode() for part in parts if part.startswith("v1,")]
    return any(hmac.compare_digest(expected, signature) for signature in signatures)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        good = verified(self.headers, body)
        self.send_response(204 if good else 401)
        self.end_headers()
        message_id = self.headers.get("webhook-id", "")
        if good and message_id not in seen:  # delivery is at least once: the same id again is the same message
            seen.add(message_id)
            message = json.loads(body)
            data = message["data"]
            run, why = data.get("run_name"), data.get("evidence", {}).get("resolved")  # "the run ended" is no cure
            parts = [message["type"], why and f"({why})", run and f"{run}:", data["alert"]["message"], data.get("url")]
            print(*filter(None, parts), flush=True)

    def log_message(self, *arguments: object) -> None: ...


HTTPServer(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 9000), Handler).serve_forever()
