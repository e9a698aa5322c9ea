"""Words a message for one service: without foreign markup, links and mentions, and no longer than the service takes.

Messages quote training scripts: an exception's text, the name of a parameter. Such text must not mention the whole
channel, nor lead anybody to a page. Two things see to that. Zero-width spaces, which nobody sees, break what begins a
mention, a tag or a link, in every service: this does not depend on how a client reads the service's markup. Then the
characters of the markup are escaped where the service has one, so that `__init__` is not shown in bold.

A bare name such as example.com stays as it is. Some clients make a link of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import quote

from perfagent_server.alerts.chat.message import Message, Severity

__all__ = ["Worded", "plain", "word"]

CUT = "… (cut)"
_BREAK = "\u200b"
_TITLE_CHARACTERS = 150
_READ_IN_A_CHAT = 3000
_READ_IN_A_MAIL = 100_000
_MARKS: dict[Severity, str] = {"critical": "🔴", "warning": "🟠", "info": "🔵", "resolved": "🟢"}

# Controls but for line feed and tab, and what turns the direction of writing around.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_WEB_ADDRESS = re.compile(r"(https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?)([/?#]\S*)?")
_LINE_ENDS = re.compile("\r\n|[\r\v\f\x85\u2028\u2029]")
_BREAKS = (
    (re.compile(r"@(?=\S)"), "@" + _BREAK),  # @everyone, @here, <@U123>
    (re.compile(r"<(?=\S)"), "<" + _BREAK),  # <!channel>, <at user_id="all">, <https://...|text>
    (re.compile(r"\](?=[(\[:])"), "]" + _BREAK),  # [text](address)
    (re.compile(r"(?<=[A-Za-z0-9]):(?=//)"), ":" + _BREAK),  # https://...
    (re.compile(r"\b(www)\.", re.IGNORECASE), rf"\1{_BREAK}."),
    (re.compile(r"\{(?=\{)"), "{" + _BREAK),  # {{DATE(...)}} in the cards of Teams
    (re.compile(r":(?=[a-z0-9_+-]*[a-z_+][a-z0-9_+-]*:)"), ":" + _BREAK),  # :smile:, but not 12:30:45
)
_MARKUP = re.compile(r"([\\`*_~|\[\]<>])|^([ \t]*)([-+#]|\d+(?=[.)]))", re.MULTILINE)


class Worded(NamedTuple):
    """What apprise is given; both parts are in the service's own markup."""

    title: str
    body: str


class _Service(NamedTuple):
    """How a service wants its text. room: of title and body together, in the unit of `size`. titled: whether the title has a
    place of its own. keyword: the last line where there is no link; Feishu and DingTalk have bots that take only messages with
    a certain word, and `perfagent` is in all of ours."""

    room: int
    size: Callable[[str], int]
    escape: Callable[[str], str] = str
    titled: bool = False
    characters: int = _READ_IN_A_CHAT
    strong: str = "{}"
    link: Callable[[str], str] = str
    line_end: str = "\n"
    keyword: str = ""


def word(kind: str, message: Message) -> Worded:
    """Never raises, whatever the text holds; the body is never empty."""
    service = _SERVICES[kind]
    title = _fitted(_title(kind, message), _TITLE_CHARACTERS, len, lambda part: service.escape(plain(_one_line(part))))
    title = service.strong.format(title)
    link = _link(service, message.url)
    room = service.room - service.size(f"{title}{service.line_end}{link}{service.line_end}")
    text = _fitted(
        message.text[: service.characters + 1], room, service.size,
        lambda part: service.escape(plain(part)).strip("\n"), characters=service.characters,
    )  # fmt: skip
    body = service.line_end.join(part for part in ("" if service.titled else title, text, link) if part)
    return Worded(title if service.titled else "", body or title)


def plain(text: str) -> str:
    """Text that shows what it says, and does nothing else."""
    text = text.encode("utf-8", "replace").decode()  # half surrogates, as of names of files
    text = _UNSEEN.sub("", _LINE_ENDS.sub("\n", text))
    for pattern, broken in _BREAKS:
        text = pattern.sub(broken, text)
    return text


def _title(kind: str, message: Message) -> str:
    title = message.title.strip() or "perfagent"
    if kind == "email":
        return f"[{message.severity}] {title}"
    return title if kind == "slack" else f"{_MARKS[message.severity]} {title}"  # Slack has a bar of color


def _one_line(text: str) -> str:
    return " ".join(_LINE_ENDS.sub("\n", text).split())


def _link(service: _Service, url: str) -> str:
    """Our own page, with nothing in its address that ends a link in some service. What is no web address is left out."""
    found = _WEB_ADDRESS.fullmatch(url[:1000])
    if found is None:
        return service.keyword
    place, rest = found.groups(default="")
    return service.link(place + quote(rest, safe="/?#&=%+,;:~"))


def _fitted(
    text: str, room: int, size: Callable[[str], int], render: Callable[[str], str], *, characters: int | None = None
) -> str:
    """As much of the text, rendered, as fits. It is cut before it is rendered, so that no escape is cut in two."""
    longest = len(text) if characters is None else min(len(text), characters)
    if longest == len(text) and size(whole := render(text)) <= room:
        return whole
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if size(render(text[:middle].rstrip() + CUT)) <= room:
            low = middle
        else:
            high = middle - 1
    return render(text[:low].rstrip() + CUT)


def _backslashes(text: str) -> str:
    """Markdown of Discord and of the cards of Teams: any punctuation may have a backslash before it."""

    def escaped(match: re.Match[str]) -> str:
        anywhere, indent, at_the_start = match.groups()
        if anywhere:
            return f"\\{anywhere}"
        return f"{indent}\\{at_the_start}" if at_the_start in "-+#" else f"{indent}{at_the_start}{_BREAK}"

    return _MARKUP.sub(escaped, text)


def _card(text: str) -> str:
    """A single line feed is none in a card."""
    return _backslashes(text).replace("\n", "\n\n")


def _utf16_units(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


def _utf8_bytes(text: str) -> int:
    return len(text.encode())


def _json_bytes(text: str) -> int:
    return len(json.dumps(text))


def _as_slack_sends(text: str) -> int:
    """apprise makes &lt; of <, &gt; of > and &amp; of &."""
    return len(text) + 4 * text.count("&") + 3 * (text.count("<") + text.count(">"))


_SERVICES = {
    "slack": _Service(8000, _as_slack_sends, titled=True),
    "discord": _Service(2000, _utf16_units, _backslashes, strong="**{}**"),
    "teams": _Service(20_000, _json_bytes, _card, titled=True, link="[Open in perfagent]({})".format, line_end="\n\n"),
    "feishu": _Service(15_000, _utf8_bytes, link="perfagent: {}".format, keyword="perfagent"),
    "dingtalk": _Service(15_000, _json_bytes, link="perfagent: {}".format, keyword="perfagent"),
    "wecom": _Service(2048, _utf8_bytes),
    "email": _Service(1_000_000, _utf8_bytes, titled=True, characters=_READ_IN_A_MAIL),
}
