"""Reads the URL of a chat or mail channel: where it sends to, which parts are secret, what may be shown.

Strict on purpose. apprise knows 255 services and, for each, options that switch off the verification of certificates,
send local files or name another host. Its own parser never sees a URL of ours: what is not named here is refused.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import quote, quote_plus, unquote, urlsplit

from perfagent.errors import ConfigError
from perfagent_server.alerts.kinds import CHAT_KINDS

__all__ = ["CHAT_KINDS", "Target", "read", "unencrypted"]

_EXPECTED = {
    "slack": "https://hooks.slack.com/services/T.../B.../... as Slack shows it, or slack://T.../B.../...",
    "discord": "https://discord.com/api/webhooks/ID/TOKEN as Discord shows it, or discord://ID/TOKEN",
    "teams": "https://HOST.logic.azure.com/... or https://HOST.api.powerplatform.com/... as the Teams workflow shows it, or"
    " workflow://HOST/WORKFLOW/SIGNATURE",
    "feishu": "https://open.feishu.cn/open-apis/bot/v2/hook/TOKEN as Feishu shows it, or feishu://TOKEN",
    "dingtalk": "https://oapi.dingtalk.com/robot/send?access_token=TOKEN as DingTalk shows it, with &secret=SEC... where"
    " the robot signs, or dingtalk://TOKEN or dingtalk://SECRET@TOKEN",
    "wecom": "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=KEY as WeCom shows it, or wecombot://KEY",
    "email": "mailtos://USER:PASSWORD@SMTP-HOST:PORT/?from=ADDRESS&to=ADDRESS,ADDRESS; further options are name= and"
    " mode=starttls or ssl",
}
_TEAMS_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*\.(logic\.azure\.com|api\.powerplatform\.com)")
_MAIL_HOST = re.compile(r"[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*\.?")
_MAIL_ADDRESS = re.compile(r"[^\s@<>()\[\]\\,;:\"%]{1,64}@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
_MAIL_PORTS = {"starttls": 587, "ssl": 465, "insecure": 25}
_MOST_RECIPIENTS = 50


@dataclass(frozen=True, slots=True)
class Target:
    """host and port: what is connected to. shown: for lists and logs. arguments: of apprise's plugin. encrypted: whether the
    connection is TLS; only mail may be without."""

    kind: str
    host: str
    shown: str
    secrets: tuple[str, ...] = field(repr=False)
    arguments: Mapping[str, Any] = field(repr=False)
    port: int = 443
    encrypted: bool = True

    def hide(self, text: str) -> str:
        """The text without any of the secrets, in whatever form a library or a server may repeat them."""
        forms = {form for secret in self.secrets for form in _forms(secret)}
        if password := self.arguments.get("password"):
            # AUTH PLAIN and AUTH LOGIN send them like this, and servers repeat lines that they do not like.
            user, password = unquote(self.arguments["user"]), unquote(password)
            forms |= {base64.b64encode(part.encode()).decode() for part in (password, f"\0{user}\0{password}")}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, "***")
        return text


def read(kind: str, url: str) -> Target:
    """Raises ConfigError for a URL that is none of that kind; its message repeats no secret."""
    if kind not in _READERS:
        raise ConfigError(f"a chat channel's kind is one of {', '.join(CHAT_KINDS)}, not {kind[:40]!r}")
    return _READERS[kind](_Parts(kind, url))


def unencrypted(host: str, port: int) -> str:
    """Why mail does not leave in the clear, and what to do."""
    return (
        f"address not allowed: {host}:{port} would get mail without encryption; use mailtos://, or to send there all the same,"
        f" start the server with PERFAGENT_WEBHOOK_ALLOW={host}:{port}"
    )


class _Parts:
    """A URL in pieces, as they were written: in slack://T.../B.../... the host is half a secret, and case matters."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind, self._url = kind, url
        self.scheme = ""
        if len(url) > 2000:
            self.refuse(f"it has {len(url)} characters, and 2000 are the most")
        if not url.isascii() or any(ord(character) < 33 or ord(character) == 127 for character in url) or "\\" in url:
            self.refuse("it holds blanks, control characters, backslashes or letters that are not ASCII")
        try:
            parts = urlsplit(url)
        except ValueError:
            self.refuse("it is no URL")
        self.scheme = parts.scheme
        self.user, self.has_user, place = parts.netloc.rpartition("@")
        self.host, colon, port = place.partition(":")
        if colon and not (port.isdecimal() and 0 < int(port[:6]) < 65536):
            self.refuse("its port is no number from 1 to 65535")
        self.port = int(port) if colon else None
        self.path = [unquote(part) for part in parts.path.strip("/").split("/") if parts.path.strip("/")]
        if parts.fragment or url.endswith("#"):
            self.refuse("it has a part behind a #, which would choose another receiver")
        self.options = self._options(parts.query)

    def _options(self, query: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for part in query.split("&") if query else ():
            name, _, value = part.partition("=")
            if name in found:
                self.refuse("it has an option twice")
            found[name] = unquote(value)
        return found

    def only(self, *, options: tuple[str, ...] = (), user: bool = False, ports: tuple[int, ...] = (443,)) -> None:
        """Refuses what is not named."""
        for name in self.options:
            if name not in options:
                # A name may be a secret that lost its own: only what looks like an option's name is repeated.
                said = f"option {name!r}" if re.fullmatch(r"[a-z_+:-]{1,16}", name) else "option that it has"
                allowed = f"; allowed are {', '.join(options)}" if options else "; it takes none"
                self.refuse(f"the {said} is not allowed{allowed}")
        if self.has_user and not user:
            self.refuse("it has a user or password before an @")
        if self.port is not None and self.port not in ports:
            self.refuse(f"it has the port {self.port}; the service listens on {ports[0]}")

    def refuse(self, why: str) -> NoReturn:
        """Only the scheme and, for web addresses, the host are repeated: in slack://... even the host is secret."""
        given = "given is something that begins with no scheme"
        if self.scheme in ("http", "https") and (host := urlsplit(self._url).hostname or ""):
            given = f"given is {self.scheme}://{host[:100]}/..."
        elif re.fullmatch(r"[a-z][a-z0-9+.-]{0,15}", self.scheme):
            given = f"given is {self.scheme}://..."
        raise ConfigError(
            f"this is no URL of a channel of kind {self.kind}: {why} ({given}). Give {_EXPECTED[self.kind]}"
        )


def _slack(url: _Parts) -> Target:
    url.only()
    hosts = {"hooks.slack.com": "hook", "hooks.slack-gov.com": "gov-hook"}
    host = url.host.lower()
    if url.scheme == "https" and host in hosts and url.path[:1] == ["services"]:
        tokens = url.path[1:]
    elif url.scheme == "slack":
        host, tokens = "hooks.slack.com", [url.host, *url.path]
    else:
        url.refuse("it is no address of an incoming webhook")
    if len(tokens) != 3 or not all(re.fullmatch(r"[A-Za-z0-9]+", token) for token in tokens):
        url.refuse("an incoming webhook has three parts of letters and digits; bots and workflows cannot be used")
    first, second, third = tokens
    arguments = {"mode": hosts[host], "token_a": first, "token_b": second, "token_c": third}
    return Target("slack", host, f"https://{host}/services/{_end(third)}", tuple(tokens), arguments)


def _discord(url: _Parts) -> Target:
    url.only()
    # Some people have the test versions of the program, which show their own host.
    hosts = ("discord.com", "discordapp.com", "canary.discord.com", "ptb.discord.com")
    if url.scheme == "https" and url.host.lower() in hosts and url.path[:2] == ["api", "webhooks"]:
        tokens = url.path[2:]
    elif url.scheme == "discord":
        tokens = [url.host, *url.path]
    else:
        url.refuse("it is no address of a webhook")
    if len(tokens) != 2 or not re.fullmatch(r"[0-9]+", tokens[0]) or not re.fullmatch(r"[A-Za-z0-9_-]+", tokens[1]):
        url.refuse("a webhook has a number and a token")
    number, token = tokens
    arguments = {"webhook_id": number, "webhook_token": token}
    return Target(
        "discord", "discord.com", f"https://discord.com/api/webhooks/{_end(token)}", (number, token), arguments
    )


def _teams(url: _Parts) -> Target:
    host = url.host.lower()
    if not _TEAMS_HOST.fullmatch(host):
        url.refuse("its host is none of Teams workflows")
    if url.scheme == "https":
        return _teams_as_shown(url, host)
    if url.scheme not in ("workflow", "workflows"):
        url.refuse("it is no address of a workflow")
    url.only(options=("pa", "route", "ver"))
    if len(url.path) != 2:
        url.refuse("it needs a workflow and a signature")
    power, route = url.options.get("pa", "no"), url.options.get("route", "")
    if power not in ("yes", "no"):
        url.refuse("the option pa is yes or no")
    workflow, signature = url.path
    return _teams_target(url, host, workflow, signature, url.options.get("ver", ""), power == "yes", route)


def _teams_as_shown(url: _Parts, host: str) -> Target:
    url.only(options=("api-version", "sp", "sv", "sig"))
    fixed = {"sp": "/triggers/manual/run", "sv": "1.0"}
    if any(url.options.get(name, value) != value for name, value in fixed.items()):
        url.refuse("the options sp and sv are those of a workflow that is started by a webhook")
    pattern = r"(powerautomate/automations/direct/(?:cu/([0-9]+)/)?)?workflows/([^/]+)/triggers/manual/paths/invoke"
    found = re.fullmatch(pattern, "/".join(url.path))
    if found is None:
        url.refuse("its path is none of a workflow that is started by a webhook")
    power, route, workflow = found.groups()
    version, signature = url.options.get("api-version", ""), url.options.get("sig", "")
    return _teams_target(url, host, workflow, signature, version, bool(power), route or "")


def _teams_target(
    url: _Parts, host: str, workflow: str, signature: str, version: str, power_automate: bool, route: str
) -> Target:
    token = re.compile(r"[A-Za-z0-9_-]+")
    if not token.fullmatch(workflow) or not token.fullmatch(signature):
        url.refuse("the workflow and its signature (sig) are letters, digits, - and _")
    if not re.fullmatch(r"[0-9a-z.-]{0,30}", version) or not re.fullmatch(r"[0-9]{0,20}", route):
        url.refuse("the version of the API or the route is malformed")
    arguments = {
        "host": host, "workflow": workflow, "signature": signature, "power_automate": power_automate,
        "version": version or None, "routing_id": route or None,
    }  # fmt: skip
    return Target("teams", host, f"https://{host}/workflows/{_end(workflow)}", (workflow, signature), arguments)


def _feishu(url: _Parts) -> Target:
    url.only()
    if (
        url.scheme == "https"
        and url.host.lower() == "open.feishu.cn"
        and url.path[:4] == ["open-apis", "bot", "v2", "hook"]
    ):
        tokens = url.path[4:]
    elif url.scheme == "feishu":
        tokens = [url.host, *url.path]
    else:
        url.refuse("it is no address of a custom bot")
    if len(tokens) != 1 or not re.fullmatch(r"[A-Za-z0-9_-]+", tokens[0]):
        url.refuse("a custom bot has one token")
    token = tokens[0]
    shown = f"https://open.feishu.cn/open-apis/bot/v2/hook/{_end(token)}"
    return Target("feishu", "open.feishu.cn", shown, (token,), {"token": token})


def _dingtalk(url: _Parts) -> Target:
    if url.scheme == "https" and url.host.lower() == "oapi.dingtalk.com" and url.path == ["robot", "send"]:
        url.only(options=("access_token", "secret"))
        token, secret = url.options.get("access_token", ""), url.options.get("secret", "")
    elif url.scheme == "dingtalk" and not url.path:
        url.only(options=("secret",), user=True)
        token, secret = url.host, unquote(url.user) or url.options.get("secret", "")
    else:
        url.refuse("it is no address of a custom robot, or names phone numbers")
    if not re.fullmatch(r"[A-Za-z0-9]+", token) or not re.fullmatch(r"[A-Za-z0-9]*", secret):
        url.refuse("the token and the secret of a custom robot are letters and digits")
    shown = f"https://oapi.dingtalk.com/robot/send?access_token={_end(token)}"
    secrets = (token, secret) if secret else (token,)
    return Target("dingtalk", "oapi.dingtalk.com", shown, secrets, {"token": token, "secret": secret or None})


def _wecom(url: _Parts) -> Target:
    native = url.scheme == "https" and url.host.lower() == "qyapi.weixin.qq.com"
    if native and url.path == ["cgi-bin", "webhook", "send"]:
        url.only(options=("key",))
        key = url.options.get("key", "")
    elif url.scheme == "wecombot" and not url.path:
        url.only()
        key = url.host
    else:
        url.refuse("it is no address of a group bot")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        url.refuse("the key of a group bot is letters, digits, - and _")
    shown = f"https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={_end(key)}"
    return Target("wecom", "qyapi.weixin.qq.com", shown, (key,), {"key": key})


def _email(url: _Parts) -> Target:
    if url.scheme not in ("mailto", "mailtos"):
        url.refuse("it is no address of a mail server")
    url.only(options=("from", "to", "name", "mode"), user=True, ports=tuple(range(1, 65536)))
    if url.path:
        url.refuse("recipients belong into the option to=")
    if not _MAIL_HOST.fullmatch(url.host) or len(url.host) > 253:
        url.refuse("it names no mail server")
    user, _, password = (unquote(part) for part in url.user.partition(":"))
    if bool(user) != bool(password):
        url.refuse("a user needs a password, and a password a user")
    if not (user + password).isascii() or not (user + password).isprintable():
        url.refuse("the user and the password are ASCII")  # smtplib knows no other
    sender = url.options.get("from", "") or user
    recipients = [part.strip() for part in url.options.get("to", "").split(",")]
    if not all(_is_mail_address(one) for one in (sender, *recipients)):
        url.refuse("from= is one address, and to= one or more with commas between them")
    if len(recipients) > _MOST_RECIPIENTS:
        url.refuse(f"to= names {len(recipients)} recipients, and {_MOST_RECIPIENTS} are the most")
    name = url.options.get("name", "perfagent")
    if not re.fullmatch(r"[A-Za-z0-9 ._-]{1,60}", name):
        url.refuse("name= is up to 60 letters, digits, blanks, dots, - and _")
    mode = _mail_mode(url)
    port = url.port or _MAIL_PORTS[mode]
    host = url.host.lower()
    more = f" and {len(recipients) - 1} more" if len(recipients) > 1 else ""
    arguments = {
        "schema": "mailto" if mode == "insecure" else "mailtos", "secure": mode != "insecure", "secure_mode": mode,
        "host": host, "smtp_host": host, "port": port, "from_addr": f"{name} <{sender}>", "targets": recipients,
        # quoted, because apprise takes the quoting off
        "user": quote(user, safe="") or None, "password": quote(password, safe="") or None,
    }  # fmt: skip
    return Target(
        "email",
        host,
        f"{arguments['schema']}://{host}:{port}/?to={_mail_shown(recipients[0])}{more}",
        (password,) if password else (),
        arguments,
        port=port,
        encrypted=mode != "insecure",
    )


def _mail_mode(url: _Parts) -> str:
    """starttls, ssl or insecure. mailto:// may ask for TLS, mailtos:// may not do without."""
    mode = url.options.get("mode", "")
    if mode not in ("", "starttls", "ssl"):
        url.refuse("mode= is starttls or ssl; without TLS it is mailto://")
    if mode:
        return mode
    if url.scheme == "mailto":
        return "insecure"
    return "ssl" if url.port == _MAIL_PORTS["ssl"] else "starttls"


def _is_mail_address(text: str) -> bool:
    return len(text) <= 254 and text.isascii() and text.isprintable() and bool(_MAIL_ADDRESS.fullmatch(text))


def _mail_shown(address: str) -> str:
    name, _, domain = address.partition("@")
    return f"{name[:2]}…@{domain}"


def _end(secret: str) -> str:
    """What tells one secret from another and gives none away: four characters of at least twenty."""
    return "…" + (secret[-4:] if len(secret) >= 20 else "")


def _forms(secret: str) -> set[str]:
    quoted = quote(secret, safe="")
    return {secret, quoted, quote(quoted, safe=""), quote(secret), quote_plus(secret)}


_READERS: dict[str, Callable[[_Parts], Target]] = {
    "slack": _slack,
    "discord": _discord,
    "teams": _teams,
    "feishu": _feishu,
    "dingtalk": _dingtalk,
    "wecom": _wecom,
    "email": _email,
}
