"""Text and command lines without secrets. First what looks like one (values.py), then what is assigned to a secret name."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

from perfagent.redaction.names import HIDDEN, WORDS, compiled, may_stay, random_looking, secret_key, weak_key
from perfagent.redaction.values import hide_known

__all__ = ["redacted_arguments", "redacted_lines", "redacted_text"]

MAX_TEXT = 20_000
MAX_LINE = 500
MAX_VALUE, MAX_RANDOM = 5_000, 220
MAX_READ = 200_000
"""Characters of one text that are looked at; of what is longer, the beginning and the end are."""

_OPTION, _NAME = r"--?[A-Za-z][\w.-]*", r"[\w./@-]{1,300}"
_USERINFO = r"(?P<scheme>(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]{0,30}://)(?P<user>[^\s/@:'\"]{0,200}):[^\s/'\"]+@"
_ALONE = r"(?P<scheme>(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]{0,30}://)[^\s/@:'\"]{20,}@"
_QUERY = r"(?i)(?P<lead>[?&](?:sig|signature|key|token|code|X-Amz-Signature|X-Amz-Credential|X-Goog-Signature)=)[^&\s'\"]+"
_HEADER = (
    r"(?i)(?P<name>(?:proxy-)?authorization|x-[a-z-]*(?:key|token)|(?:set-)?cookie)"
    r"(?P<gap>['\"]?\]?\s*(?:[:=]|,\s*['\"])\s*['\"]?)(?P<value>[^\n'\"]+)"
)
_SCHEME = r"(?i)\b(?P<kind>bearer|basic|token)(?P<gap>\s+)(?P<value>[A-Za-z0-9+/._~-]{12,}=*)"
_ASSIGNMENT = r"(?<![\w.-])(?P<name>[A-Za-z_-][\w.-]{0,300}+)(?P<gap>\\?['\"]?\]?\s{0,20}(?:=>|:=|==|=|:)\s{0,20})(?=\S)"
_FLAG = r"(?<!\S)(?P<name>--?[A-Za-z][\w.-]*+)(?P<gap>\s+)(?=[^\s-])"
_VALUE = r"\\\"[^\"\n]*?\\\"|[rbfu]?'(?:[^'\\\n]|\\.)*+'|[rbfu]?\"(?:[^\"\\\n]|\\.)*+\"|[^\s;&'\"]++"
_QUOTES = ("'", '"')
_NEXT_NAME = r",['\"]?[A-Za-z_][\w.-]{0,60}['\"]?[=:]"
_LOGIN = (
    r"(?P<lead>\blogin\s+\S+\s+password\s+)\S+|(?P<curl>\bcurl\b[^\n|;]{0,300}?\s(?:-u|--user)[ =]?['\"]?[^\s:'\"]+:)[^\s'\"]+"
)
_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits + "._+/@-")
"""A text of these alone is one word: nothing in it has a value, so it can only be a secret by itself."""


def redacted_text(text: str) -> str:
    """Text without what looks like a secret, by its value or by the name that it is assigned to; in the middle of what is
    longer than 20,000 characters something is left out."""
    text = _encodable(text)
    if len(text) < 6:
        return text
    left_out = 0
    if len(text) > MAX_READ:
        text, left_out = _ends(text, MAX_READ)
    text = _hide(text)  # before it is cut: half a secret is known by nothing
    if len(text) > MAX_TEXT or left_out:
        text, more = _ends(text, MAX_TEXT)
        left_out += more
    return text


def redacted_lines(lines: Iterable[str]) -> list[str]:
    """Lines of output, at most 500 characters of each. As one text, since a private key has many lines (and for speed)."""
    text = _encodable("\n".join(line[: 8 * MAX_LINE] for line in lines))
    return [line[:MAX_LINE] for line in _hide(text).split("\n")]


def _encodable(text: str) -> str:
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")
    return text.replace("\0", "�") if "\0" in text else text


def _ends(text: str, room: int) -> tuple[str, int]:
    """Beginning and end of a text, cut between words, and how many characters are missing."""
    head, tail = text[: room // 2], text[-room // 2 :]
    kept = max(head.rfind(" "), head.rfind("\n"))
    first = min((at for at in (tail.find(" "), tail.find("\n")) if at >= 0), default=0)
    head, tail = head[: kept + 1 or len(head)], tail[first:]
    missing = len(text) - len(head) - len(tail)
    return f"{head}\n[... {missing} characters left out ...]\n{tail}", missing


def _hide(text: str) -> str:
    text = hide_known(text)
    if _WORD_CHARACTERS.issuperset(text):
        return text
    if "://" in text:
        if "@" in text:
            text = compiled(_USERINFO).sub(rf"\g<scheme>\g<user>:{HIDDEN}@", text)
            text = compiled(_ALONE).sub(rf"\g<scheme>{HIDDEN}@", text)
        if "=" in text:
            text = compiled(_QUERY).sub(rf"\g<lead>{HIDDEN}", text)
    lower = text.lower()
    if any(word in lower for word in WORDS):
        if ":" in text or "=" in text or "," in text:
            if "authorization" in lower or "cookie" in lower or "x-" in lower:
                text = compiled(_HEADER).sub(_hide_header, text)
            text = _hide_values(_ASSIGNMENT, text)
        if "-" in text:
            text = _hide_values(_FLAG, text)
        if "bearer" in lower or "basic" in lower or "token " in lower:
            text = compiled(_SCHEME).sub(_hide_scheme, text)
    if "login" in lower or "curl" in lower:
        text = compiled(_LOGIN).sub(lambda match: (match["lead"] or match["curl"]) + HIDDEN, text)
    return text


def _hide_header(match: re.Match[str]) -> str:
    value = match["value"].strip()
    if may_stay(match["name"], value) or value.startswith(HIDDEN):
        return match[0]
    return f"{match['name']}{match['gap']}{HIDDEN}"


def _hide_values(pattern: str, text: str) -> str:
    """Names and values, one after the other; what is no secret is looked into: `client = Client(api_key="x")`."""
    parts: list[str] = []
    search = compiled(pattern).search
    done = at = 0
    while (match := search(text, at)) is not None:
        at, name = match.end(), match["name"].lstrip("-")
        if not (secret_key(name) or weak_key(name)):
            continue
        value = _value_at(text, at, MAX_VALUE if secret_key(name) else MAX_RANDOM)
        if _is_secret(name, value):
            parts += (text[done:at], HIDDEN)
            done = at = at + len(value)
    return "".join((*parts, text[done:])) if parts else text


def _value_at(text: str, at: int, limit: int) -> str:
    match = compiled(_VALUE).match(text, at, at + limit)
    if match is None:
        return ""
    value = match[0]
    if value.endswith(_QUOTES):
        return value
    following = compiled(_NEXT_NAME).search(value)  # `api_key=x,lr=0.1`
    return (value[: following.start()] if following else value).rstrip(",)]}.")


def _is_secret(name: str, value: str) -> bool:
    bare = value.lstrip("rbfu") if value.endswith(_QUOTES) else value
    bare = bare.strip("'\"\\")
    if value.startswith("//") or not bare or bare.startswith(HIDDEN[:-1]):
        return False
    if secret_key(name):
        return not may_stay(name, bare)
    return random_looking(bare)


def _hide_scheme(match: re.Match[str]) -> str:
    """`Bearer x`, `Basic x`, but not "basic understanding"."""
    value = match["value"]
    if re.search(r"\d|[a-z][A-Z]|=$", value) is None or (match["kind"].lower() == "token" and not random_looking(value)):
        return match[0]
    return f"{match['kind']}{match['gap']}{HIDDEN}"


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without secrets: `--api-key=X` and `--api-key X` by name, long random words by their entropy."""
    result: list[str] = []
    option, in_name = compiled(_OPTION).fullmatch, compiled(_NAME).fullmatch
    hide_next = ""
    for argument in arguments:
        name, hide_next = hide_next, ""
        if name and not option(argument):
            result.append(argument if may_stay(name, argument) else HIDDEN)
            continue
        name, equals, value = argument.partition("=")
        bare = name.lstrip("-+~")
        if option(name) and secret_key(bare):
            result.append(argument if not equals or may_stay(bare, value) else f"{name}={HIDDEN}")
            hide_next = "" if equals else bare
        elif equals and in_name(bare) and ((secret_key(bare) and not may_stay(bare, value)) or random_looking(value)):
            result.append(f"{name}={HIDDEN}")
        else:
            result.append(HIDDEN if random_looking(argument) else redacted_text(argument))
    return result
