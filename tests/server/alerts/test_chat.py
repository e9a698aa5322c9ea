"""Alerts in chat and by mail: bodies as the services document them, failures told without secrets, nothing in a text that
mentions or links.

Each service is a local HTTPS server that answers for the service's host, and mail goes to a local mail server. Nothing here
was ever sent to a real service.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from email import message_from_bytes
from email.header import decode_header, make_header
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
import trustme
from builders import free_port
from chat_services import Answer, ChatService, MailServer, Request, answers_for, trusts
from syrupy.assertion import SnapshotAssertion

import perfagent_server.alerts.chat.plugins  # noqa: F401 - here, since urllib3 binds a socket at its import
from perfagent.errors import ConfigError
from perfagent_server.alerts.chat import CHAT_KINDS, Message, Outcome, check, masked, send
from perfagent_server.alerts.chat.targets import read
from perfagent_server.alerts.chat.wording import CUT, word
from perfagent_server.security.outbound import AddressNotAllowed, Guard

real = pytest.mark.real

SIGNATURE = "KODuebWbDGYFr0z0eu-6Rj8aUKz7108W3wrNJZxFE5A"
WORKFLOW = "643e69f83c8944438d68119179a10a64"
TEAMS = f"https://prod-161.westeurope.logic.azure.com:443/workflows/{WORKFLOW}/triggers/manual/paths/invoke"
SIGNED = f"&sp=%2Ftriggers%2Fmanual%2Frun&sv=1.0&sig={SIGNATURE}"
URLS = {
    "slack": "https://hooks.slack.com/services/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",
    "discord": "https://discord.com/api/webhooks/417429632418316298/JHZ7lQml277CDHmQKMHI8qBe7bk2ZwO5UKjCiOAF7711o33MyqU344",
    "teams": f"{TEAMS}?api-version=2016-06-01{SIGNED}",
    "feishu": "https://open.feishu.cn/open-apis/bot/v2/hook/0d1e2f3a-4b5c-6d7e-8f9a-0b1c2d3e4f5a",
    "dingtalk": "https://oapi.dingtalk.com/robot/send?access_token=6ddd4eb4c7b59d7d72545d29d0b0f1e3&secret=SEC00112233445566778899",
    "wecom": "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=693a91f6-7xxx-4bc4-97a0-0ec2sifa5aaa",
}
SECRETS = {
    "slack": ["T012AB3CD", "B045EF6GH", "zQ7xW3vL9pK2mN5tR8yU1iO4"],
    "discord": ["417429632418316298", "JHZ7lQml277CDHmQKMHI8qBe7bk2ZwO5UKjCiOAF7711o33MyqU344"],
    "teams": [SIGNATURE, WORKFLOW],
    "feishu": ["0d1e2f3a-4b5c-6d7e-8f9a-0b1c2d3e4f5a"],
    "dingtalk": ["6ddd4eb4c7b59d7d72545d29d0b0f1e3", "SEC00112233445566778899"],
    "wecom": ["693a91f6-7xxx-4bc4-97a0-0ec2sifa5aaa"],
    "email": ["p@ss/w0rd+uber", quote("p@ss/w0rd+uber", safe=""), base64.b64encode(b"p@ss/w0rd+uber").decode()],
}
OTHERS = tuple(URLS)
TAKEN = {
    "slack": b"ok",
    "discord": b"",
    "teams": b"",
    "feishu": b'{"code": 0, "data": {}, "msg": "success"}',
    "dingtalk": b'{"errcode": 0, "errmsg": "ok"}',
    "wecom": b'{"errcode": 0, "errmsg": "ok"}',
}
HOSTS = {kind: read(kind, url).host for kind, url in URLS.items()}
PAGE = "https://perfagent.example/runs/r1?tab=alerts&x=1"
ALERT = Message(
    title="loss became NaN", text="step 1200, rank 3\nfirst in layer 7", severity="critical", url=PAGE
)  # fmt: skip


def taken(request: Request) -> Answer:
    kind = next(kind for kind, host in HOSTS.items() if host == request.host)
    return 204 if kind == "discord" else 202 if kind == "teams" else 200, {}, TAKEN[kind]


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy of this machine, and the authority of the local servers."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    trusts(monkeypatch, tmp_path)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatService]:
    with ChatService(*HOSTS.values(), answer=taken) as service:
        answers_for(monkeypatch, service)
        yield service


def tried(kind: str, url: str = "", **options: Any) -> Outcome:
    return send(kind, url or URLS[kind], ALERT, Guard(), **options)


def sent(service: ChatService, kind: str, message: Message = ALERT, url: str = "") -> Request:
    """What the service gets for a message that it takes."""
    outcome = send(kind, url or URLS[kind], message, Guard())
    assert outcome.delivered, outcome
    assert outcome.error == ""
    return service.requests[-1]


# --- what arrives -----------------------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize("kind", OTHERS)
def test_a_service_gets_the_body_that_it_documents(services: ChatService, kind: str, words: SnapshotAssertion) -> None:
    """slack: https://docs.slack.dev/legacy/legacy-messaging/legacy-secondary-message-attachments
    discord: https://discord.com/developers/docs/resources/webhook#execute-webhook; flags: 4 is SUPPRESS_EMBEDS. `wait` is an
    option of the query there; in the body, where apprise puts it, Discord reads over it.
    teams: https://learn.microsoft.com/en-us/connectors/teams/#microsoft-teams-webhook and, for the text of a card,
    https://learn.microsoft.com/en-us/adaptive-cards/authoring-cards/text-features
    feishu: https://open.feishu.cn/document/client-docs/bot-v3/add-custom-bot
    dingtalk: https://open.dingtalk.com/document/robots/custom-robot-access
    wecom: https://developer.work.weixin.qq.com/document/path/91770"""
    request = sent(services, kind)
    over = sent(services, kind, Message(title="over", text="", severity="resolved"))
    assert "\n".join(json.dumps(one.json, ensure_ascii=False, sort_keys=True) for one in (request, over)) == words
    asked = urlsplit(URLS[kind])
    assert request.path.rstrip("/") == asked.path
    assert kind == "dingtalk" or request.query == dict(parse_qsl(asked.query))
    assert request.headers["content-type"].startswith("application/json")


@real
def test_dingtalk_gets_a_signature_that_it_can_check(services: ChatService) -> None:
    """https://open.dingtalk.com/document/robots/customize-robot-security-settings"""
    query = sent(services, "dingtalk").query
    assert set(query) == {"access_token", "timestamp", "sign"}
    assert abs(int(query["timestamp"]) / 1000 - time.time()) < 60
    secret = "SEC00112233445566778899"
    digest = hmac.new(secret.encode(), f"{query['timestamp']}\n{secret}".encode(), hashlib.sha256).digest()
    assert query["sign"] == base64.b64encode(digest).decode()
    assert set(sent(services, "dingtalk", url="dingtalk://6ddd4eb4c7b59d7d").query) == {"access_token"}


# --- texts of others --------------------------------------------------------------------------------------------------

NASTY = (
    "@everyone @here <!channel> <!subteam^S1> <@U012> <@&99> <#C1> <at>Bob</at> <at user_id=\"all\">all</at> @all "
    "[click](https://evil.example) <https://evil.example|click> https://evil.example/x http://evil.example www.evil.example "
    "`code` **bold** __init__ ~~gone~~ ||spoiler|| :skull: {{DATE(2017-02-14T06:08:00Z, SHORT)}}\n# big\n- item\n1. one\n> said"
)  # fmt: skip
REVIVED = re.compile(r"@(everyone|here|all|U012|&99)|<[!@#a/h]|\]\(|://|www\.|:skull:|\{\{|<https?:", re.IGNORECASE)


def texts(value: object) -> Iterator[str]:
    """Every text of a body."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


@real
@pytest.mark.parametrize("kind", OTHERS)
def test_any_text_is_sent_mentions_nobody_and_links_nowhere(services: ChatService, kind: str) -> None:
    body = sent(services, kind, Message(title=NASTY.split("\n")[0][:140], text=NASTY, severity="warning")).json
    own = ("http://adaptivecards.io/schemas/adaptive-card.json", "application/")
    found = [text for text in texts(body) if "evil" in text]
    assert found
    for text in texts(body):
        assert text.startswith(own) or not REVIVED.search(text), text
    for text in found:
        seen = re.sub(r"\\(?=[^\w\s])", "", text.replace("\u200b", "")).replace("&lt;", "<").replace("&gt;", ">")
        assert "@everyone" in seen  # it still says what it said
    for message in (
        Message(title="", text="", severity="info"),
        Message(title="\x00\u202e", text="\ud800\x07\r", severity="warning", url="javascript:alert(1)"),
        Message(title="x" * 100_000, text="ж" * 1_000_000, severity="resolved", url=PAGE),
    ):
        assert len(sent(services, kind, message).body) < 28_000


def worded(kind: str, text: str, url: str = "", title: str = "t") -> str:
    return word(kind, Message(title=title, text=text, severity="info", url=url)).body


@pytest.mark.parametrize("kind", ["discord", "teams"])
def test_markup_is_shown_as_it_was_written(kind: str) -> None:
    """Every character that Markdown would read has a backslash before it, so that `__init__` stays one."""
    body = worded(kind, NASTY).partition("@")[2]
    assert not re.search(r"(?<!\\)[*_`~|\[\]<>]", body.replace("\\\\", ""))
    for shown in (r"\_\_init\_\_", "\n\\# big", "\n\\- item", "\n1\u200b. one"):
        assert shown in body


ROOM: dict[str, tuple[int, Callable[[str], int]]] = {
    "slack": (8000, len),
    "discord": (2000, lambda text: len(text.encode("utf-16-le")) // 2),
    "teams": (28_000, lambda text: len(json.dumps(text))),
    "feishu": (20_000, lambda text: len(text.encode())),
    "dingtalk": (20_000, lambda text: len(json.dumps(text))),
    "wecom": (2048, lambda text: len(text.encode())),
    "email": (2_000_000, len),
}


@pytest.mark.parametrize("kind", CHAT_KINDS)
def test_long_texts_are_cut_visibly_and_fit(kind: str) -> None:
    room, size = ROOM[kind]
    assert CUT not in worded(kind, "word " * 200, PAGE)
    for letter in ("x", "_", "&", "@", "ж", "𝄞", "\n", "é\u200d"):
        message = Message(title="a title", text="begin" + letter * 200_000 + "end", severity="critical", url=PAGE)
        found = word(kind, message)
        assert size(found.title + found.body) <= room, letter
        assert "begin" in found.body
        assert "end" not in found.body.replace(PAGE, "")
        lines = found.body.rstrip().split("\n")
        assert PAGE in lines[-1]  # the link is kept
        assert next(line for line in reversed(lines[:-1]) if line).endswith(CUT)
        assert kind not in ("feishu", "dingtalk") or "perfagent" in lines[-1].replace(PAGE, ""), (
            "a keyword of the bot's"
        )


# --- what goes wrong --------------------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize("kind", OTHERS)
def test_status_of_a_refusal_is_told_and_no_redirect_followed(
    services: ChatService, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = (301, 302, 303, 307, 308, 400, 401, 403, 404, 410, 429, 500, 503)
    with ChatService("elsewhere.example") as other:
        answers_for(monkeypatch, services, other)
        for status in statuses:
            more = {"Retry-After": "17"} if status in (429, 503) else {"Location": "https://elsewhere.example/x"}
            services.answer = lambda _, status=status, more=more: (status, more, b"no such\nwebhook")  # type: ignore[misc]
            outcome = tried(kind)
            assert (outcome.status, outcome.delivered) == (status, False)
            assert outcome.retry_after == more.get("Retry-After")
            hint = "; redirects are not followed" if status < 400 else ""
            assert outcome.error == f"{HOSTS[kind]} answered {status}: no such webhook{hint}"
    assert (len(services.requests), other.requests) == (len(statuses), []), "one try each"


@real
@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("slack", b"invalid_token"),
        ("feishu", b'{"code": 19024, "msg": "Key Words Not Found", "data": {}}'),
        ("feishu", b'{"StatusCode": 9499, "StatusMessage": "Bad Request"}'),
        ("dingtalk", b'{"errcode": 310000, "errmsg": "sign not match"}'),
        ("wecom", b'{"errcode": 93000, "errmsg": "invalid webhook url"}'),
    ],
)
def test_a_refusal_with_status_200_is_not_delivered(services: ChatService, kind: str, answer: bytes) -> None:
    services.answer = lambda _: (200, {}, answer)
    error = f"{HOSTS[kind]} answered 200 and did not take the message: {answer.decode()}"
    assert tried(kind) == Outcome(None, error)


OVER = r"hooks\.slack\.com (took longer than \d(\.\d)? s$|gave no answer: TimeoutError: )"
"""Told by who waits for the try, or by the try itself, whoever notices first."""


@real
def test_a_service_that_does_not_answer_ends_in_time(services: ChatService) -> None:
    services.answer = lambda _: services.released.wait() and (200, {}, b"")  # type: ignore[assignment, return-value]
    outcome = tried("slack", total_s=0.3)
    assert outcome.status is None
    assert re.match(OVER, outcome.error)


def _unknown(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@real
@pytest.mark.parametrize("kind", OTHERS)
def test_unreachable_or_untrusted_service_gets_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_for(monkeypatch, ports={HOSTS[kind]: free_port()})
    assert tried(kind).error.startswith(f"{HOSTS[kind]} gave no answer: ConnectionRefusedError: ")
    with ChatService(HOSTS[kind], by=trustme.CA()) as stranger, ChatService("other.example") as other:
        for port in (stranger.port, other.port):
            answers_for(monkeypatch, ports={HOSTS[kind]: port})
            outcome = tried(kind)
            assert (outcome.status, "CERTIFICATE_VERIFY_FAILED" in outcome.error) == (None, True)
    assert stranger.requests == other.requests == []
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    assert tried(kind).error == f"{HOSTS[kind]} gave no answer: gaierror: [Errno -2] Name or service not known"


@real
def test_what_netrc_has_for_all_hosts_is_not_sent(
    services: ChatService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("default login me password mine\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "authorization" not in sent(services, "slack").headers


# --- secrets ----------------------------------------------------------------------------------------------------------


def leaks(kind: str, text: str) -> list[str]:
    """Secrets in a text, or pieces of them that are longer than may be shown."""
    pieces = (secret[at : at + 8] for secret in SECRETS[kind] for at in range(max(1, len(secret) - 7)))
    return [piece for piece in pieces if piece in text]


@real
@pytest.mark.parametrize("kind", OTHERS)
def test_no_secret_is_in_an_error_or_a_log(
    services: ChatService, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even when the service repeats all it got, as it came and decoded."""
    for name in ("", "apprise", "urllib3.connectionpool"):
        caplog.set_level(logging.DEBUG, name)

    def echo(request: Request) -> Answer:
        said = f"{request.path} {request.query} " + " ".join(SECRETS[kind])
        return 404, {"Retry-After": "9"}, (said + quote(said, safe="")).encode()

    services.answer = echo
    outcomes = [tried(kind)]
    services.answer = taken
    outcomes.append(tried(kind))
    answers_for(monkeypatch, ports={HOSTS[kind]: 1})
    outcomes.append(tried(kind))
    assert [(one.status, one.delivered) for one in outcomes[::2]] == [(404, False), (None, False)]
    assert outcomes[1].delivered
    assert leaks(kind, f"{outcomes}") == []
    logged = "\n".join(f"{record.getMessage()} {record.args} {record.exc_text}" for record in caplog.records)
    assert leaks(kind, logged) == []


def test_masked_urls_differ_where_the_channels_do() -> None:
    one = URLS["slack"]
    assert masked("slack", one) == "https://hooks.slack.com/services/…1iO4"
    assert masked("slack", one[:-1] + "5") != masked("slack", one)
    assert masked("slack", "slack://T/B/short") == "https://hooks.slack.com/services/…"
    assert masked("email", MAIL) == "mailtos://smtp.example.com:587/?to=al…@example.com and 1 more"
    assert masked("webhook", one) == "a URL that is none of kind webhook"


@pytest.mark.parametrize("kind", CHAT_KINDS)
def test_what_is_wrong_with_a_url_is_said_without_its_secrets(kind: str) -> None:
    url = URLS.get(kind, MAIL)
    assert leaks(kind, masked(kind, url)) == []
    assert HOSTS.get(kind, "smtp.example.com") in masked(kind, url)
    glue = "&" if "?" in url else "?"
    wrong = [
        url + f"{glue}verify=no", url + f"{glue}{SECRETS[kind][0]}", url + "#general", url + "/" + SECRETS[kind][-1], url[:20],
        url.replace("https://", "").replace("mailtos://", ""), url.replace("https", "http").replace("mailtos", "smtp"),
        url.replace("https://", "json://").replace("mailtos://", "jsons://"), url + " x", url + "ü", url + "x" * 2000, "",
        SECRETS[kind][-1], SECRETS[kind][-1] + "://x", url.replace("://", ":/"),
    ]  # fmt: skip
    for text in wrong:
        with pytest.raises(ConfigError) as refused:
            check(kind, text, PUBLIC)
        outcome = tried(kind, text or " ")
        assert leaks(kind, f"{refused.value} {outcome.error} {masked(kind, text)}") == [], text
        assert f"kind {kind}" in str(refused.value)
        assert outcome.status is None


# --- which URLs are taken ---------------------------------------------------------------------------------------------

MAIL = (
    f"mailtos://{quote('bot@example.com', safe='')}:{quote('p@ss/w0rd+uber', safe='')}@smtp.example.com/"
    "?from=bot@example.com&to=alice+gpu@example.com,bob@example.com"
)
TO = "/?from=a@example.com&to=b@example.com"
ACCEPTED = [
    *URLS.items(),
    ("email", MAIL),
    ("slack", "slack://T012AB3CD/B045EF6GH/zQ7xW3vL9pK2mN5tR8yU1iO4/"),
    ("discord", "discord://417429632418316298/JHZ7lQml277CD_Hm-QK"),
    ("teams", f"workflows://x.environment.api.powerplatform.com/{WORKFLOW}/{SIGNATURE}/?pa=yes&route=17&ver=1"),
    ("feishu", "feishu://0d1e2f3a-4b5c-6d7e-8f9a-0b1c2d3e4f5a"),
    ("dingtalk", "https://oapi.dingtalk.com/robot/send?access_token=6ddd4eb4c7b59d7d72545d29d0b0f1e3"),
    ("wecom", "wecombot://693a91f6-7xxx-4bc4-97a0-0ec2sifa5aaa"),
    ("email", "mailtos://smtp.example.com?from=a@example.com&to=b@example.com"),
    ("email", f"mailtos://me:word@smtp.example.com:465{TO}&name=Training%20bot"),
    ("email", f"mailto://me:word@smtp.example.com{TO}&mode=starttls"),
]
REFUSED = {
    "slack": [
        "https://evil.example/services/T1/B1/abc", "https://hooks.slack.com.evil.example/services/T1/B1/abc",
        "https://user@hooks.slack.com/services/T1/B1/abc", "https://hooks.slack.com:8443/services/T1/B1/abc",
        "http://hooks.slack.com/services/T1/B1/abc", "slack://T1/B1/abc#general", "slack://bot@T1/B1/abc",
        "slack://T1/B1/abc?template=/etc/passwd", "slack://T1/B1/abc?verify=no", "slack://T1/B1/a%2Fb",
        "discord://417429632418316298/JHZ7lQml", "https://hooks.slack.com/services/T1/B1/a\nb",
    ],
    "discord": [
        "discord://417429632418316298/JHZ7lQml?ping=@everyone", "https://discord.com/api/users/1/JHZ7lQml",
    ],
    "teams": [
        *(f"https://{host}/workflows/{WORKFLOW}/triggers/manual/paths/invoke?sig={SIGNATURE}"
          for host in ("evil.example", "logic.azure.com.evil.example", "evillogic.azure.com")),
        f"{TEAMS}?api-version=2016-06-01&sp=%2Fother&sv=1.0&sig={SIGNATURE}", f"{TEAMS.replace('443', '8443')}?sig={SIGNATURE}",
        f"{TEAMS}?api-version=2016-06-01&sp=%2Ftriggers%2Fmanual%2Frun&sv=1.0", f"workflow://10.0.0.1/{WORKFLOW}/{SIGNATURE}",
    ],
    "feishu": ["https://open.larksuite.com/open-apis/bot/v2/hook/0d1e2f3a", "feishu://0d1e2f3a/more", "lark://0d1e2f3a"],
    "dingtalk": [
        "dingtalk://6ddd4eb4c7b59d7d/13800000000", "https://oapi.dingtalk.com/robot/send?access_token=6ddd&access_token=7eee",
        "https://oapi.dingtalk.com/robot/send",
    ],
    "wecom": ["wecombot://693a91f6?key=other", "https://qyapi.weixin.qq.com/cgi-bin/webhook/upload_media?key=693a91f6"],
    "email": [
        *(f"mailtos://me:word@smtp.example.com{rest}" for rest in (
            "/?to=b@example.com", "/?from=a@example.com", f"{TO}&smtp=10.0.0.1", f"{TO}&verify=no", f"{TO}&mode=insecure",
            f"{TO}&+Bcc=c@example.com", f"{TO}%0d%0aBcc:c@example.com", f"{TO}&pgp=sign&pgpprv=/etc/passwd",
            f"/c@example.com{TO[1:]}", f":0{TO}",
        )),
        f"mailtos://me@smtp.example.com{TO}", f"mailtos://me:word@{TO}", f"mailtos://smtp.example.com{TO}{',b@example.com' * 50}",
        f"mailtos://{'a' * 64}.example.com{TO}", "json://smtp.example.com",
    ],
}  # fmt: skip
PUBLIC = Guard(resolver=lambda host, port: ["93.184.216.34"])


@pytest.mark.parametrize(("kind", "url"), ACCEPTED)
def test_urls_are_taken_as_people_copy_them(kind: str, url: str) -> None:
    check(kind, url, PUBLIC)


@pytest.mark.parametrize(("kind", "url"), [(kind, url) for kind, urls in REFUSED.items() for url in urls])
def test_a_url_that_does_more_is_refused(kind: str, url: str) -> None:
    with pytest.raises(ConfigError, match=f"this is no URL of a channel of kind {kind}: .*Give "):
        check(kind, url, PUBLIC)


def test_other_kinds_are_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"is one of slack, discord, teams, .* email, not 'json'"):
        check("json", "json://example.com", PUBLIC)


# --- mail -------------------------------------------------------------------------------------------------------------

# Of the test's server: that it lets people log in without TLS, and words about its own internals.
talkative = pytest.mark.filterwarnings("ignore:Requiring AUTH", "ignore:Session.login_data is deprecated")
LOGIN = f"{quote('bot@example.com', safe='')}:{quote('p@ss/w0rd+uber', safe='')}@"
ACCOUNTS = {"bot@example.com": "p@ss/w0rd+uber"}
LOST = "451 4.7.1 try later"
UNKNOWN = "550 5.1.1 no such user"


def mail_url(server: Any, *, scheme: str = "mailtos", login: str = "", options: str = "", to: str = "") -> str:
    to = to or "alice+gpu@example.com,bob@example.com"
    return f"{scheme}://{login}smtp.example.com:{server.port}/?from=bot@example.com&to={to}{options}"


def mailed(server: Any, message: Message = ALERT, *, total_s: float = 30.0, **url: str) -> Outcome:
    guard = Guard([f"smtp.example.com:{server.port}"], resolver=lambda host, port: ["127.0.0.1"])
    return send("email", mail_url(server, **url), message, guard, total_s=total_s)


@real
@talkative
@pytest.mark.parametrize(("tls", "scheme", "options"), [
    ("starttls", "mailtos", ""), ("ssl", "mailtos", "&mode=ssl"), ("starttls", "mailto", "&mode=starttls"), ("", "mailto", ""),
])  # fmt: skip
def test_a_mail_arrives(tls: str, scheme: str, options: str) -> None:
    """https://www.rfc-editor.org/rfc/rfc5322 for its fields, RFC 3207 for STARTTLS and RFC 8314 for TLS from the start."""
    with MailServer(tls=tls, accounts=ACCOUNTS) as server:
        assert mailed(server, scheme=scheme, login=LOGIN, options=options) == Outcome(250, "")
    assert [mail.recipients for mail in server.mails] == [["alice+gpu@example.com"], ["bob@example.com"]]
    mail = server.mails[0]
    assert (mail.sender, mail.encrypted) == ("bot@example.com", bool(tls))
    parsed = message_from_bytes(mail.content)
    assert str(make_header(decode_header(parsed["Subject"]))) == "[critical] loss became NaN"
    assert (parsed["From"], parsed["To"]) == ("perfagent <bot@example.com>", "alice+gpu@example.com")
    assert (parsed.get_content_type(), parsed.get_content_charset()) == ("text/plain", "utf-8")
    body = parsed.get_payload(decode=True)
    assert isinstance(body, bytes)
    assert body.decode().splitlines() == ["step 1200, rank 3", "first in layer 7", PAGE]


@real
def test_a_subject_is_one_line_whatever_the_title_holds() -> None:
    """And the mail server's name is resolved once: a second answer could lead inside."""
    asked: list[str] = []
    with MailServer() as server:
        message = Message(title="x\r\nBcc: eve@example.com\n\nbody @everyone", text="", severity="info")
        guard = Guard([f"{server.name}:{server.port}"], resolver=lambda host, port: asked.append(host) or ["127.0.0.1"])  # type: ignore[func-returns-value]
        assert send("email", mail_url(server, to="a@example.com"), message, guard).delivered
    assert asked == ["smtp.example.com"]
    parsed = message_from_bytes(server.mails[0].content)
    assert parsed["Bcc"] is None
    assert str(make_header(decode_header(parsed["Subject"]))).replace("\u200b", "") == (
        "[info] x Bcc: eve@example.com body @everyone"
    )
    assert server.mails[0].recipients == ["a@example.com"]


@real
@talkative
def test_a_wrong_password_is_told_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the server's reply is cut in the midst of it."""
    caplog.set_level(logging.DEBUG)
    with MailServer(accounts={"bot@example.com": "another"}, chat="x" * 257) as server:
        outcome = mailed(server, login=LOGIN)
    assert (outcome.status, server.mails) == (535, [])
    assert outcome.error.startswith(f"smtp.example.com:{server.port}: it refused the login: 535 ")
    ours = [one.getMessage() for one in caplog.records if not one.name.startswith(("mail", "asyncio"))]
    assert leaks("email", "\n".join([outcome.error, *ours])) == []


@real
@pytest.mark.parametrize(
    ("reply", "to", "status"),
    [(UNKNOWN, "", 250), (LOST, "", 451), (LOST, "bob@example.com", 451), (UNKNOWN, "bob@example.com", 550)],
)
def test_refused_recipient_stops_no_other_and_is_tried_again(reply: str, to: str, status: int) -> None:
    """Where he is refused for good and another has the mail, it is delivered: else each would get it with every try."""
    with MailServer(refused={"bob@example.com": reply}) as server:
        outcome = mailed(server, to=to)
    assert outcome == Outcome(status, f"smtp.example.com:{server.port} refused bob@example.com: {reply}")
    assert [mail.recipients for mail in server.mails] == ([] if to else [["alice+gpu@example.com"]])


@real
@pytest.mark.parametrize(
    ("tls", "is_stranger", "options", "said"),
    [
        ("", False, "", "STARTTLS"),
        ("starttls", True, "", "CERTIFICATE_VERIFY_FAILED"),
        ("ssl", True, "&mode=ssl", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_mail_does_not_leave_where_encryption_fails(tls: str, is_stranger: bool, options: str, said: str) -> None:
    with MailServer(tls=tls, by=trustme.CA() if is_stranger else None) as server:
        assert said in mailed(server, login=LOGIN, options=options).error
    assert server.mails == []


@pytest.mark.parametrize(
    ("scheme", "address", "said"),
    [
        (
            "mailtos",
            "127.0.0.1",
            r"smtp.example.com \(127.0.0.1\) is not on the public internet.*ALLOW=smtp.example.com:25",
        ),
        ("mailto", "93.184.216.34", "would get mail without encryption"),
    ],
)
def test_mail_goes_out_encrypted_and_inside_only_where_allowed(scheme: str, address: str, said: str) -> None:
    guard = Guard(resolver=lambda host, port: [address])
    url = mail_url(SimpleNamespace(port=25), scheme=scheme)
    with pytest.raises(AddressNotAllowed, match=said):
        check("email", url, guard)
    outcome = send("email", url, ALERT, guard)
    assert outcome.status is None
    assert re.search(said, outcome.error)
