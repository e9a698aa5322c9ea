"""A real OpenID provider on a socket: oidc-provider-mock, which is built for tests, with a door for the faults that no
provider has of itself. It compares no PKCE verifier; what it is sent is noted here, and the tests do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, urlencode

import httpx
import oidc_provider_mock
import werkzeug.serving

__all__ = ["Provider", "openid_provider"]


@dataclass
class Provider:
    """issuer: its address. audience: the client that it takes everybody for, "" for who they say they are. is_down: answers
    500 to everything. asked: the forms that came to the token endpoint."""

    issuer: str
    audience: str = ""
    is_down: bool = False
    asked: list[dict[str, str]] = field(default_factory=list)

    def approve(self, authorization_url: str, subject: str, **changed: str) -> str:
        """The person `subject` signs in there: the address to which the browser is led back. changed: parameters of the
        authorization request that somebody has tampered with."""
        address, _, query = authorization_url.partition("?")
        asked = f"{address}?{urlencode({**dict(parse_qsl(query)), **changed})}"
        answer = httpx.post(asked, data={"sub": subject})
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]


@contextlib.contextmanager
def openid_provider(**people: dict[str, Any]) -> Iterator[Provider]:
    """people: the claims of who has an account there, by subject."""
    users = [oidc_provider_mock.User(sub=subject, claims=claims) for subject, claims in people.items()]
    app = oidc_provider_mock.app(require_nonce=True, user_claims=users)
    provider = Provider("")
    server = werkzeug.serving.make_server("127.0.0.1", 0, _door(app, provider), threaded=True)
    provider.issuer = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _door(app: Any, provider: Provider) -> Callable[..., Iterable[bytes]]:
    def door(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if provider.is_down:
            start("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"out of order"]
        if environ["REQUEST_METHOD"] == "POST" and "token" in environ["PATH_INFO"]:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            form = dict(parse_qsl(body.decode()))
            provider.asked.append(form)
            environ["wsgi.input"] = BytesIO(body)
            if provider.audience:
                environ.pop("HTTP_AUTHORIZATION", None)
                sent = urlencode({**form, "client_id": provider.audience, "client_secret": "any"}).encode()
                environ |= {"wsgi.input": BytesIO(sent), "CONTENT_LENGTH": str(len(sent))}
        result: Iterable[bytes] = app(environ, start)
        return result

    return door
