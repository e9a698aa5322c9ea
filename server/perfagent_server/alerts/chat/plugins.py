"""apprise's plugins, and what stands between them and the network. Imported only once a chat channel is used.

The plugins call `requests.post` and `smtplib.SMTP` by the name of the module, and throw the answer away: they say whether
they believe that the message arrived. That is not enough. DingTalk and WeCom refuse with a status of 200, which their
plugins take for success; Retry-After, 410 and the reason of a failure are lost; a mail server's name is resolved once
more after the guard has checked it. So in the seven modules that we use, and nowhere else, the names `requests` and
`smtplib` mean the two stand-ins below. They hand on what the plugin asked for, within the limits of the call, and note
the answer. They have nothing else of the two modules: a version of apprise that sends in another way fails, when a
channel is made or when it sends, and does not get past them.

The registry of apprise, through which a URL could reach any of its services, is never loaded.
"""

from __future__ import annotations

import io
import logging
import re
import smtplib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
from apprise import AppriseAsset, NotifyFormat, NotifyType
from apprise.plugins import dingtalk, discord, feishu, slack, wecombot, workflows
from apprise.plugins.email import base as email
from apprise.plugins.email import smtp

from perfagent.errors import PerfagentError, ResourceError, how_to_install
from perfagent_server.alerts.chat.call import current
from perfagent_server.alerts.chat.message import Severity
from perfagent_server.alerts.chat.targets import Target, unencrypted
from perfagent_server.alerts.chat.wording import Worded
from perfagent_server.security.outbound import AddressNotAllowed

__all__ = ["make", "notify"]

_CONNECT_S = 4.0
_MOST_BODY = 64 * 1024
_TYPES: dict[Severity, NotifyType] = {
    "info": NotifyType.INFO,
    "warning": NotifyType.WARNING,
    "critical": NotifyType.FAILURE,
    "resolved": NotifyType.SUCCESS,
}


def make(target: Target) -> Any:
    """The plugin for a target. Raises whatever apprise raises for arguments that it does not take."""
    # No file is kept, no redirect followed.
    asset = AppriseAsset(
        app_id="perfagent", app_desc="perfagent", app_url="", http_redirects=False, storage_mode="memory"
    )
    extra = _OPTIONS.get(target.kind, {})
    return _PLUGINS[target.kind](asset=asset, verify=True, redirect=False, **target.arguments, **extra)


def notify(target: Target, worded: Worded, severity: Severity) -> bool:
    """Whether apprise believes that the message arrived. To be called within a Call."""
    # Without a format apprise leaves the text as it is; as text, Slack's plugin makes entities of <, > and &.
    escaped = target.kind in ("discord", "teams")
    return bool(
        make(target).notify(
            body=worded.body,
            title=worded.title,
            notify_type=_TYPES[severity],
            body_format=None if escaped else NotifyFormat.TEXT,
        )
    )


class _Discord(discord.NotifyDiscord):
    """Mentions nobody, whatever the text says, and tries once: apprise's second try would wait beyond our deadline."""

    def _send(self, payload: dict[str, Any], *rest: Any, **options: Any) -> bool:
        options["rate_limit"] = 0
        return super()._send({**payload, "allowed_mentions": {"parse": []}}, *rest, **options)


class _DingTalk(dingtalk.NotifyDingTalk):
    """apprise percent-encodes the signature, and requests does so once more: decoded once, it would not match."""

    def get_signature(self) -> tuple[str, str]:
        timestamp, signature = super().get_signature()  # type: ignore[no-untyped-call]
        return timestamp, unquote(signature)


_PLUGINS: dict[str, Any] = {
    "slack": slack.NotifySlack,
    "discord": _Discord,
    "teams": workflows.NotifyWorkflows,
    "feishu": feishu.NotifyFeishu,
    "dingtalk": _DingTalk,
    "wecom": wecombot.NotifyWeComBot,
    "email": email.NotifyEmail,
}

# Images would be loaded from apprise's own address, and Slack's time stamp would be that of the try. 4: no preview of links.
_OPTIONS: dict[str, dict[str, Any]] = {
    "slack": {"include_image": False, "include_timestamp": False},
    "discord": {"avatar": False, "flags": 4},
    "teams": {"include_image": False},
}


class _Requests:
    """Stands for the module `requests` in plugins that send by HTTP.

    Proxies of the environment are used, as by any program of requests: many servers reach the internet only so. It costs no
    safety here, because the host is a fixed one of the service and TLS ends there; with webhooks, whose host is anybody's
    choice, a proxy would connect to addresses that the guard refuses. REQUESTS_CA_BUNDLE is used as well.
    """

    codes, RequestException = requests.codes, requests.RequestException

    def post(self, url: str, **options: Any) -> requests.Response:
        return self.request("POST", url, **options)

    def request(
        self, method: str, url: str, *, data: Any, headers: Any, params: Any = None, **_: Any
    ) -> requests.Response:
        call = current.get()
        parts = urlsplit(url)
        if (parts.scheme, parts.hostname, parts.port or 443) != ("https", call.target.host, call.target.port):
            raise AddressNotAllowed(
                f"address not allowed: apprise wanted to send to another host than {call.target.host}"
            )
        try:
            with requests.Session() as session:
                session.auth = _as_it_is  # or requests would add what ~/.netrc has for all hosts
                left = call.left_s()
                with session.request(
                    method, url, data=data, headers=headers, params=params, timeout=(min(_CONNECT_S, left), left), verify=True,
                    allow_redirects=False, stream=True,
                ) as answer:  # fmt: skip
                    call.status = answer.status_code
                    call.retry_after = answer.headers.get("Retry-After", "")[:300] or None
                    call.body = _start_of(answer.iter_content(8192), call.left_s)
        except Exception as error:
            call.failure = _reason(error)
            raise
        whole = requests.Response()
        whole.status_code, whole.headers, whole.raw = answer.status_code, answer.headers, io.BytesIO(call.body)
        return whole


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _start_of(chunks: Iterator[bytes], left_s: Any) -> bytes:
    """As much of an answer as anybody reads, within the time."""
    body = b""
    for chunk in chunks:
        body += chunk
        left_s()
        if len(body) >= _MOST_BODY:
            break
    return body[:_MOST_BODY]


class _Mail(smtplib.SMTP):
    """A connection to a mail server that goes to the very address that the guard allows, and notes what became of it."""

    _host: str

    def __init__(
        self, host: str, port: int, local_hostname: str | None = None, *, timeout: float, **options: Any
    ) -> None:
        call = current.get()
        call.mail = self
        with _noted("the connection"):
            super().__init__(host, port, local_hostname, timeout=min(timeout, call.left_s()), **options)

    def starttls(self, *, context: ssl.SSLContext | None = None) -> Any:  # type: ignore[override]
        with _noted("STARTTLS"):
            return super().starttls(context=context)

    def login(self, user: str, password: str, *, initial_response_ok: bool = True) -> Any:
        with _noted("the login"):
            return super().login(user, password, initial_response_ok=initial_response_ok)

    def sendmail(self, from_addr: str, to_addrs: Any, msg: Any, *options: Any) -> Any:
        with _noted("the message"):
            refused = super().sendmail(from_addr, to_addrs, msg, *options)
        current.get().taken += 1
        return refused

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:  # noqa: ARG002
        call = current.get()
        find = call.guard.addresses if call.target.encrypted else call.guard.listed_addresses
        addresses = find(host, port)
        if not addresses:
            raise AddressNotAllowed(unencrypted(host, port))
        for address in addresses[:-1]:
            try:
                return socket.create_connection((address, port), min(_CONNECT_S, call.left_s()))
            except OSError:
                continue
        return socket.create_connection((addresses[-1], port), min(_CONNECT_S, call.left_s()))


class _MailOverTls(_Mail, smtplib.SMTP_SSL):
    def _get_socket(self, host: str, port: int, timeout: float) -> ssl.SSLSocket:
        plain = super()._get_socket(host, port, timeout)
        return self.context.wrap_socket(plain, server_hostname=self._host)


class _Smtplib:
    """Stands for the module `smtplib` in apprise's plugin for mail."""

    SMTP, SMTP_SSL, SMTPException = _Mail, _MailOverTls, smtplib.SMTPException


@contextmanager
def _noted(what: str) -> Iterator[None]:
    call = current.get()
    try:
        yield
    except smtplib.SMTPRecipientsRefused as error:
        for address, (code, reply) in error.recipients.items():
            call.refused[address] = (code, _text(reply))
        raise
    except smtplib.SMTPResponseException as error:
        call.status, call.failure = error.smtp_code, f"it refused {what}: {error.smtp_code} {_text(error.smtp_error)}"
        raise
    except (OSError, smtplib.SMTPException) as error:
        call.failure = f"{what} failed: {_reason(error)}"
        raise


def _reason(error: BaseException) -> str:
    """Of an exception that others were wrapped around. Those of requests repeat the URL, which is a secret."""
    if isinstance(error, PerfagentError):
        return str(error)
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    said = re.sub(r"//[^/@\s]*@", "//***@", str(error))  # the password of a proxy
    return f"{type(error).__name__}: {said}"


def _text(reply: bytes | str) -> str:
    """What a mail server said. First without secrets, then cut: half a secret would not be found."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)
    return current.get().target.hide(" ".join(text.split()))[:300]


class _Heard(logging.Filter):
    """Keeps to ourselves what is logged while we send: apprise and urllib3 log addresses with their tokens."""

    def filter(self, record: logging.LogRecord) -> bool:
        call = current.get(None)
        if call is None:
            return True
        if record.levelno >= logging.WARNING:
            call.heard.append(record.getMessage())
        return False


def _stand_in(module: ModuleType, name: str, real: ModuleType, ours: object) -> None:
    if getattr(module, name, None) is not real:
        raise ResourceError(
            f"the installed version of apprise cannot be used: {module.__name__} has no {name}; install another, "
            + how_to_install("server")
        )
    setattr(module, name, ours)


for _module in (slack, discord, workflows, feishu, dingtalk, wecombot):
    _stand_in(_module, "requests", requests, _Requests())
_stand_in(smtp, "smtplib", smtplib, _Smtplib())
for _logger in ("apprise", "urllib3.connectionpool"):
    logging.getLogger(_logger).addFilter(_Heard())
