"""Sends to chats and mailboxes by apprise (the extra `notify`), and says what may be shown of their addresses.

Only these kinds of apprise's services are reachable, with their own hosts; no address can switch verification off,
attach a file or follow a redirect. What a training script wrote is text: it mentions nobody and links nowhere. None of
it was sent to a real service: the tests run servers that answer for their names.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from perfagent.errors import ConfigError
from perfagent_server.alerts.outcome import Outcome
from perfagent_server.security.outbound import Guard

__all__ = ["Message", "check", "masked", "send"]

Severity = Literal["info", "warning", "critical", "resolved"]
_TYPES: dict[Severity, str] = {"info": "info", "warning": "warning", "critical": "failure", "resolved": "success"}
_MOST = 1900  # characters of a text: what the smallest of them takes, with room for title and address
_TEAMS = (".logic.azure.com", ".api.powerplatform.com")
_MAIL_OPTIONS = frozenset(("to", "cc", "bcc", "from", "name", "mode"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Plain text. url: of the page that has more."""

    title: str
    text: str
    severity: Severity
    url: str = ""


@dataclass(frozen=True, slots=True)
class _Service:
    """schema: apprise's; native: what an address looks like as the service shows it; example: of it, for error texts."""

    schema: str
    native: re.Pattern[str]
    example: str


_SERVICES = {
    "slack": _Service(
        "slack", re.compile(r"https://hooks\.slack\.com/services/(T\w+)/(B\w+)/(\w+)/?"), "https://hooks.slack.com/services/T.../B.../..."
    ),
    "discord": _Service(
        "discord", re.compile(r"https://discord(?:app)?\.com/api/webhooks/(\d+)/([\w-]+)/?"), "https://discord.com/api/webhooks/ID/TOKEN"
    ),
    "teams": _Service(
        "workflow", re.compile(r"https://([\w.-]+)(?::443)?/(?:powerautomate/automations/direct/)?workflows/(\w+)/triggers/manual/paths/invoke\?(\S+)"),
        "https://....logic.azure.com/workflows/ID/triggers/manual/paths/invoke?...&sig=...",
    ),
    "feishu": _Service(
        "feishu", re.compile(r"https://open\.feishu\.cn/open-apis/bot/v2/hook/([\w-]+)/?"), "https://open.feishu.cn/open-apis/bot/v2/hook/TOKEN"
    ),
    "dingtalk": _Service(
        "dingtalk", re.compile(r"https://oapi\.dingtalk\.com/robot/send\?access_token=(\w+)"), "https://oapi.dingtalk.com/robot/send?access_token=TOKEN"
    ),
    "wecom": _Service(
        "wecombot", re.compile(r"https://qyapi\.weixin\.qq\.com/cgi-bin/webhook/send\?key=([\w-]+)"), "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=KEY"
    ),
    "email": _Service(
        "mailtos", re.compile(r"(?!)"), "mailtos://USER:PASSWORD@smtp.example.com?from=perfagent@example.com&to=you@example.com"
    ),
}  # fmt: skip


def check(kind: str, url: str, guard: Guard) -> None:
    """Raises ConfigError for what is no address of this kind, AddressNotAllowed for one that must be none."""
    _receiver(kind, url, guard)
    _apprise()


def masked(kind: str, url: str) -> str:
    """What may be shown: the service and its host, and enough of the first part to tell two of them apart."""
    if kind == "email":
        parts = urlsplit(url)
        to = dict(parse_qsl(parts.query)).get("to", "")
        return f"{parts.scheme}://{parts.hostname or ''}{f'?to={to}' if to else ''}"
    found = _SERVICES[kind].native.fullmatch(url)
    if found is None:
        return f"{_SERVICES[kind].schema}://..."
    parts = urlsplit(url)
    told = found[2] if kind == "teams" else found[1]
    return f"{parts.scheme}://{parts.hostname}/{told[:4]}..."


def send(kind: str, url: str, message: Message, guard: Guard) -> Outcome:
    """One try. Raises ConfigError, and AddressNotAllowed or OSError where the guard does. apprise tells a status in its log
    only, and no Retry-After."""
    receiver = _receiver(kind, url, guard)
    apprise = _apprise()
    asset = apprise.AppriseAsset(
        http_redirects=False, async_mode=False, app_id="perfagent", app_url="", image_url_mask=""
    )
    plugin = apprise.Apprise.instantiate(receiver, asset=asset)
    if plugin is None:
        raise ConfigError(f"this is no address of {kind}; it looks like {_SERVICES[kind].example}")
    text = message.text if kind == "email" else _harmless(message.text)
    title = message.title if kind == "email" else _harmless(message.title)
    body = "\n".join(filter(None, [_cut(text), message.url]))
    with _log_of_this_thread() as said:
        done = plugin.notify(body=body, title=title[:240], notify_type=_TYPES[message.severity], body_format="text")
    if done:
        return Outcome(200, "")
    error = _without_secrets("; ".join(said) or "the service did not take it", url)
    status = re.search(r"error=(\d{3})\b", error)
    return Outcome(int(status[1]) if status else None, error[:500])


def _receiver(kind: str, url: str, guard: Guard) -> str:
    """apprise's address of what a person gave. Raises ConfigError."""
    service = _SERVICES[kind]
    if kind == "email":
        return _mailbox(url, guard)
    found = service.native.fullmatch(url.strip())
    if found is None:
        raise ConfigError(f"this is no address of {kind}; it looks like {service.example}")
    if kind != "teams":
        return f"{service.schema}://{'/'.join(found.groups())}/?format=text"
    host, workflow, query = found.groups()
    options = dict(parse_qsl(query))
    if not host.endswith(_TEAMS) or not options.get("sig"):
        raise ConfigError(
            f"a Teams workflow is at one of {', '.join('*' + end for end in _TEAMS)}, and signed (sig=...)"
        )
    is_automate = "&pa=yes" if "/powerautomate/" in url else ""
    version = f"&api-version={quote(options['api-version'], safe='')}" if "api-version" in options else ""
    return f"workflow://{host}:443/{workflow}/{quote(options['sig'], safe='')}/?image=no{is_automate}{version}"


def _mailbox(url: str, guard: Guard) -> str:
    example = _SERVICES["email"].example
    try:
        parts = urlsplit(url.strip())
        port = parts.port or (587 if parts.scheme == "mailtos" else 25)
    except ValueError:
        raise ConfigError(f"this is no address of a mailbox; it looks like {example}") from None
    if parts.scheme not in ("mailto", "mailtos") or not parts.hostname:
        raise ConfigError(f"an address of a mailbox looks like {example}")
    options = dict(parse_qsl(parts.query))
    unknown = sorted(options.keys() - _MAIL_OPTIONS)
    if unknown or parts.path.strip("/"):
        given = ", ".join(unknown) or parts.path
        raise ConfigError(f"a mailbox takes {', '.join(sorted(_MAIL_OPTIONS))}, not {given[:80]!r}")
    if not options.get("to"):
        raise ConfigError(f"a mailbox needs a receiver: {example}")
    guard.addresses(parts.hostname, port)
    if parts.scheme == "mailto" and not guard.names(parts.hostname, port):
        raise ConfigError(
            "mailto:// sends passwords in the clear; use mailtos://, or name the host in PERFAGENT_WEBHOOK_ALLOW"
        )
    return f"{url.strip()}&format=text"


@cache
def _apprise() -> Any:
    """apprise, with our services only. Raises ConfigError without it."""
    try:
        import apprise
    except ImportError:
        raise ConfigError(
            "chats and mail need apprise: run `pip install 'perfagent[notify]'` where the server runs"
        ) from None
    manager: Any = apprise.NotificationManager  # untyped
    manager().enable_only(*(service.schema for service in _SERVICES.values()), "mailto")
    # At DEBUG they write addresses and bodies down, which are secret.
    for name in ("apprise", "urllib3", "requests"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("apprise").propagate = False
    return apprise


@contextmanager
def _log_of_this_thread() -> Iterator[list[str]]:
    """What apprise says meanwhile, in this thread: its functions return True and False, and log the reason."""
    said: list[str] = []
    mine = threading.get_ident()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == mine:
                said.append(" ".join(record.getMessage().split()))

    listener = Listener(logging.WARNING)
    logger = logging.getLogger("apprise")
    logger.addHandler(listener)
    try:
        yield said
    finally:
        logger.removeHandler(listener)


def _harmless(text: str) -> str:
    """Text that no chat reads as a mention, a link or a tag: with a zero-width space where one would begin."""
    text = text.replace("@", "@\u200b").replace("](", "]\u200b(").replace("://", ":\u200b//")
    return text.replace("<", "\u2039").replace(">", "\u203a")


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else text[: _MOST - 20] + "\n... (cut here)"


def _without_secrets(text: str, url: str) -> str:
    """The text without any part of the address that is longer than a few characters, however it is encoded."""
    parts = urlsplit(url)
    pieces = {
        url,
        parts.username or "",
        parts.password or "",
        *parts.path.split("/"),
        *dict(parse_qsl(parts.query)).values(),
    }
    public = {"services", "api", "webhooks", "workflows", "triggers", "manual", "paths", "invoke", "robot", "send"}
    for piece in sorted(pieces - public, key=len, reverse=True):
        for form in {piece, unquote(piece), quote(piece, safe="")}:
            if len(form) > 3:
                text = text.replace(form, "***")
    return text.encode("utf-8", "replace").decode().replace("\0", "")
