"""Chat and mail: Slack, Discord, Teams, Feishu, DingTalk, WeCom and email, through apprise.

check() a URL when a channel is made, show it masked(), send() a Message. The tests send to local servers that answer for
the hosts of the services, and compare with what the services document. **Nothing has been sent to the real services.**

What is not known: whether Teams posts a message that its workflow accepted (202), and whether a mail arrives that its
server took. A service may also show a message and lose its answer; then the message is sent again.
"""

from __future__ import annotations

import json
import smtplib
import socket
import threading
import time
from contextlib import suppress
from types import ModuleType

from perfagent.errors import ConfigError, PerfagentError
from perfagent_server.alerts.chat.call import Call, current
from perfagent_server.alerts.chat.message import Message, Severity
from perfagent_server.alerts.chat.targets import CHAT_KINDS, Target, read, unencrypted
from perfagent_server.alerts.chat.wording import word
from perfagent_server.alerts.outcome import Outcome
from perfagent_server.security.outbound import TOTAL_S, AddressNotAllowed, Guard

__all__ = ["CHAT_KINDS", "Message", "Outcome", "Severity", "check", "masked", "send"]


def check(kind: str, url: str, guard: Guard) -> None:
    """Raises ConfigError for a URL that cannot be a channel of that kind, ResourceError (one of them) when this version of
    apprise cannot be used, and AddressNotAllowed for a mail server that must not be sent to. No message repeats a secret.
    Nothing is sent, but the name of a mail server is looked up; one that does not resolve now may do so later, and passes."""
    target = read(kind, url)
    plugins = _plugins()
    if kind == "email":
        _check_mail_server(target, guard)
    token = current.set(Call(target, guard, time.monotonic() + TOTAL_S))
    try:
        plugins.make(target)
    except Exception as error:  # noqa: BLE001 - apprise raises several kinds, and names the token in them
        raise ConfigError(f"apprise does not take {target.shown}: {target.hide(str(error))[:300]}") from None
    finally:
        current.reset(token)


def masked(kind: str, url: str) -> str:
    """What lists, logs and errors may show: the host and at most four characters of a long token; of a mail server's URL the
    server, and the beginning of the first recipient. Never raises."""
    try:
        return read(kind, url).shown
    except ConfigError:
        return f"a URL that is none of kind {kind[:20]}"


def send(kind: str, url: str, message: Message, guard: Guard, *, total_s: float = TOTAL_S) -> Outcome:
    """One try, which ends after total_s seconds. Never raises for what the network, the service or apprise do.

    status: the HTTP status of the answer, with retry_after, or the reply code of the mail server (250 where it took the mail).
    It is None when there was no answer, and when the service answered 200 and refused the message all the same, as Feishu,
    DingTalk and WeCom do. A mail with several recipients, of whom some are refused for good (5xx), is delivered; the error
    names them. Sent again, it would reach the others a second time.
    """
    try:
        call = Call(read(kind, url), guard, time.monotonic() + total_s)
        plugins = _plugins()
    except ConfigError as error:
        return Outcome(None, str(error)[:500])
    outcomes: list[Outcome] = []
    # In a thread of its own, because neither a look-up of a name nor a server that drips can be interrupted.
    thread = threading.Thread(
        target=lambda: outcomes.append(_try(plugins, call, message)), name="perfagent-chat", daemon=True
    )
    thread.start()
    thread.join(total_s)
    if outcomes:
        return outcomes[0]
    call.over = True
    _hang_up(call.mail)
    where = f"{call.target.host}:{call.target.port}" if kind == "email" else call.target.host
    return Outcome(None, f"{where} took longer than {total_s:g} s")


def _plugins() -> ModuleType:
    """apprise, loaded at the first use. Raises ResourceError where its version cannot be used."""
    from perfagent_server.alerts.chat import plugins

    return plugins


def _check_mail_server(target: Target, guard: Guard) -> None:
    with suppress(OSError):
        if target.encrypted:
            guard.addresses(target.host, target.port)
        elif not guard.listed_addresses(target.host, target.port):
            raise AddressNotAllowed(unencrypted(target.host, target.port))


def _try(plugins: ModuleType, call: Call, message: Message) -> Outcome:
    """The sending thread."""
    current.set(call)
    try:
        believed = plugins.notify(call.target, word(call.target.kind, message), message.severity)
    except PerfagentError as error:
        return Outcome(None, _speakable(call, str(error)))
    except Exception as error:  # noqa: BLE001 - whatever apprise does must not end the outbox; it is told as the error
        believed = False
        call.failure = call.failure or f"{type(error).__name__}: {error}"
    finally:
        if call.mail is not None:
            call.mail.close()
    return _mail_outcome(call, believed) if call.target.kind == "email" else _chat_outcome(call, believed)


def _chat_outcome(call: Call, believed: bool) -> Outcome:
    host, status = call.target.host, call.status
    if status is None:
        why = call.failure or "; ".join(call.heard) or "apprise did not send"
        return Outcome(None, _speakable(call, f"{host} gave no answer: {why}"))
    said = _quoted(call)
    if not 200 <= status < 300:
        hint = "; redirects are not followed" if 300 <= status < 400 else ""
        return Outcome(status, _speakable(call, f"{host} answered {status}{said}{hint}"), call.retry_after)
    if believed and not _refused_with_200(call.target.kind, call.body):
        return Outcome(status, "")
    why = f"; {call.failure}" if call.failure else ""
    return Outcome(None, _speakable(call, f"{host} answered {status} and did not take the message{said}{why}"))


def _mail_outcome(call: Call, believed: bool) -> Outcome:
    where = f"{call.target.host}:{call.target.port}"
    refused = "; ".join(f"{address}: {code} {reply}" for address, (code, reply) in call.refused.items())
    permanent = all(code >= 500 for code, _ in call.refused.values())
    lost = call.failure and not believed
    if call.taken and not lost and permanent:
        return Outcome(250, _speakable(call, f"{where} refused {refused}") if refused else "")
    if call.refused and not lost:
        code = next(iter(call.refused.values()))[0]
        return Outcome(code, _speakable(call, f"{where} refused {refused}"))
    why = call.failure or "; ".join(call.heard) or "apprise did not send"
    return Outcome(call.status, _speakable(call, f"{where}: {why}"))


def _refused_with_200(kind: str, body: bytes) -> bool:
    """Feishu, DingTalk and WeCom tell in the body what others tell by the status."""
    if kind not in ("feishu", "dingtalk", "wecom"):
        return False
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    names = ("code", "errcode", "StatusCode")
    return isinstance(answer, dict) and any(answer.get(name) not in (None, 0, "0") for name in names)


def _quoted(call: Call) -> str:
    """The beginning of an answer, for the error. First without secrets, then cut: half a secret would not be found."""
    text = call.target.hide(" ".join(call.body.decode("utf-8", "replace").split()))
    return f": {text[:200]}" if text else ""


def _speakable(call: Call, text: str) -> str:
    """An error's text without secrets, as a database can hold it."""
    return call.target.hide(text).encode("utf-8", "replace").decode().replace("\0", "")[:500]


def _hang_up(mail: smtplib.SMTP | None) -> None:
    """Ends a dialogue with a mail server that takes too long, and with it the thread that holds it."""
    connection = mail.sock if mail is not None else None
    if connection is not None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
