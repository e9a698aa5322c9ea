"""Removes secrets from text: first what looks like one (values.py) or is known to be one (remembered.py), then what is
assigned to a secret name, and what mentions a secret in other ways (free_text.py).
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable

from perfagent.redaction.free_text import hide_said, hide_short_options
from perfagent.redaction.names import (
    HEX,
    HIDDEN,
    WORDS,
    compiled,
    may_stay,
    noted,
    random_looking,
    secret_key,
    stands_for,
)  # fmt: skip
from perfagent.redaction.remembered import hide_remembered
from perfagent.redaction.values import hide_known

__all__ = ["may_begin_with_a_dash", "may_have_more", "redacted_lines", "redacted_text"]

MAX_TEXT = 20_000
MAX_LINE = 500
MAX_VALUE, MAX_RANDOM = 5_000, 220
MAX_READ = 200_000
"""Characters of one text that are looked at; of what is longer, the beginning and the end are."""

_USERINFO = r"(?P<scheme>(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]{0,30}://)(?P<user>[^\s/@:'\"]{0,200}):[^\s/'\"]+@"
_WITH_SLASHES = (
    r"(?P<scheme>(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]{0,30}://)(?P<user>[^\s/@:'\"]{0,200}|\[redacted\])"
    r":(?!\d{1,5}[/?#]|\[redacted\])[^\s@:'\"]{1,200}/[^\s@:'\"]{0,200}@(?=[\w.\[-]+(?:[:/?#]|$|[\s'\"]))"
)
"""A password may hold a slash, as half of the keys of AWS do; what follows the colon is no port then."""
_ALONE = r"(?P<scheme>(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]{0,30}://)[^\s/@:'\"]{20,}@"
# The name of a user is no secret, so a short word alone is hidden only where it is usually a token: on the web.
_ON_THE_WEB = r"(?P<scheme>(?<![a-zA-Z0-9.-])https?://)(?!git@)[^\s/@:?&=#'\"]{3,200}@(?=\w)"
_QUERY = r"(?i)(?P<lead>[?&](?:sig|(?:q-)?signature|key|token|code|X-Amz-Signature|X-Amz-Credential|X-Goog-Signature)=)[^&\s'\"]+"
_HEADER = (
    r"(?i)(?P<name>(?:proxy-)?authorization|x-[a-z-]{0,60}(?:key|token)|(?:set-)?cookie)"
    r"(?P<gap>['\"]?\]?\s*(?:[:=]|,\s*['\"])\s*(?:[rbfu]{0,2}['\"])?)(?P<value>Digest [^\n]+|[^\n'\"]+)"
)
_SCHEME = r"(?i)\b(?P<kind>bearer|basic|token)(?P<gap>\s+)(?P<value>[A-Za-z0-9+/._~-]{12,}=*)"
_ASSIGNMENT = (
    r"(?<![\w.-])(?P<name>[A-Za-z_-][\w.-]{0,300}+)(?P<gap>\\?['\"]?\]?\s{0,20}(?:=[=>]?|!=|:=?|：)\s{0,20})(?=\S)"
)
_TYPE = (
    r"(?:Optional\[)?(?:\w{1,20}\.)?(?:str|bytes|SecretStr)\]?(?:\s?\|\s?None)?\s{0,3}=(?!=)\s{0,3}(?=\S)"
    r"|!!\w{1,20}\s{1,20}(?=\S)"
)
"""What may stand before the value: `api_key: str | None = "X"` in Python, `api_key: !!str X` in YAML."""
_FLAG = r"(?<![^\s'\"])(?P<name>--?[A-Za-z][\w.-]*+)(?P<gap>\s+|['\"],\s*(?=['\"]))(?=\S)"
"""Of a command line, also as Python prints a list: `Command '['train.py', '--api-key', 'X']' returned ...`."""
_MORE_VALUES = r"(?:,?[ \t]+(?!['\"]?-)['\"]?[^\s;&|'\",)\]]+['\"]?)*"
_PAIR = (
    r"(?<!\S)(?:--(?:opts?|set|overrides?|cfg-options)\s{1,20}(?P<name>[A-Za-z_][\w.-]{0,100}+)"
    r"|(?P<path>[A-Z][A-Z0-9_]{0,60}+\.[A-Z][A-Z0-9_.]{0,100}+))[ \t]{1,20}(?=[^\s=:-])"
)
"""`--opts api_key X`, and `LOGGER.API_KEY X` wherever it stands: yacs takes names and values in turn, and writes names
so."""
_SIGNS_OF_PAIRS = (r"\.[A-Z]", r"--(?:[os]|cfg)")
_NAMED = (
    r"(?i)\b(?:name|key)['\"]?\s{0,20}[:=]\s{0,20}['\"]?(?P<name>[\w.-]{1,100}+)['\"]?\s{0,40},?\s{0,40}"
    r"['\"]?\bvalue['\"]?\s{0,20}[:=]\s{0,20}(?=\S)"
)
"""`{"name": "HF_TOKEN", "value": X}`, as Kubernetes lists variables."""
_VALUE = r"\\\"[^\"\n]*?\\\"|[rbfu]?'(?:[^'\\\n]|\\.)*+'|[rbfu]?\"(?:[^\"\\\n]|\\.)*+\"|[^\s;&'\"]++"
_BRACKETED = (
    r"[\w.]{0,200}+[(\[{](?:'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"|[^\n'\"()\[\]{}]"
    r"|[(\[{](?:'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"|[^\n'\"()\[\]{}]|[(\[{][^\n()\[\]{}]*+[)\]}])*+[)\]}])*+[)\]}]"
)
"""`auth=("me", "X")`, `cookies={"sid": "X"}`, `password=SecretStr("X")`: hidden up to the last bracket. With the first
word alone the password of `auth=` stayed visible."""
_COMPUTED = r"[A-Za-z_]\w*(?:\.\w+)+(?:\([^'\"]*\)|\[[^'\"]*\])"
"""A call or index by a dotted path without a text in it stays visible, since tracebacks are full of them:
`token = self.tokenizer.decode(ids)`, `token = self.vocab[word]`, `cls: torch.Size([1, 768])`."""
_DONE = r"\[redacted(?!\][\w-])"
"""Hidden before, and not a part of it only: `https://me:[redacted]@host`."""
_QUOTES = ("'", '"')
_NEXT_NAME = r",['\"]?[A-Za-z_][\w.-]{0,60}['\"]?[=:]"
_BLOCK = r"[|>][0-9+-]{0,2}[ \t]*(?P<end>\n|\\n)"
"""How a value of several lines begins in YAML, also as Python and JSON print it."""
_LIST = r"-[ \t]+[^\n]*(?:\n[ \t]*-[ \t]+[^\n]*)*"
"""The values of a name in YAML, a line each."""
_TAKES_VALUE = r"(?i)passw|passphrase|pwd|secret|credential|(?:token|key)s?$|(?:^|[._-])(?:pass|pw)$"
_LOGS_IN = (
    r"(?:login['\"]?(?:\s+--?[\w-]+(?:[=\s]\S+)?){0,4}\s+['\"]?|login\(\s*['\"]?"
    r"|-wandb\s+|\bwandb['\"]?\]?\s*[:=]\s*['\"]?)\Z"
)
_IS_KEY = r"(?<![\w-])(?:--)?(?:wandb[._-])?(?:api[._-])?(?:key|api)['\"]?\]?\s{0,5}[:=,]?\s{0,5}['\"]?\Z"
_LOGIN = (
    r"(?P<lead>\blogin\s+\S+\s+password\s+)\S+|"
    r"(?P<curl>\bcurl\b[^\n|;]{0,300}?\s(?:-u|--user)[ =]?['\"]?[^\s:'\"]+:)[^\s'\"]+"
)
_AS_DIGITS = bytes(ord("0" if chr(byte) in string.hexdigits else ".") for byte in range(256))
"""Whether a text has 32 hexadecimal digits in a row is told by this translation twenty times faster than by a
pattern."""
_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits + "._+/@-")
"""A text of these alone is one word: nothing in it has a value, so it can only be a secret by itself."""


def redacted_text(text: str) -> str:
    """Text without what looks like a secret, by its value or by the name that it is assigned to; in the middle of what
    is longer than 20,000 characters something is left out."""
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
    """Lines of output, at most 500 characters of each. As one text, since a private key has many lines (and for
    speed)."""
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
    text = hide_remembered(hide_known(text))  # in this order: one that is remembered may be a part of another
    if _WORD_CHARACTERS.issuperset(text):
        return text
    if "://" in text and "@" in text:
        text = compiled(_USERINFO).sub(rf"\g<scheme>\g<user>:{HIDDEN}@", text)
        text = compiled(_WITH_SLASHES).sub(rf"\g<scheme>\g<user>:{HIDDEN}@", text)
        text = compiled(_ALONE).sub(rf"\g<scheme>{HIDDEN}@", text)
        text = compiled(_ON_THE_WEB).sub(rf"\g<scheme>{HIDDEN}@", text)
    if "=" in text and ("&" in text or "?" in text):
        text = compiled(_QUERY).sub(rf"\g<lead>{HIDDEN}", text)
    text = hide_short_options(text)
    lower = text.lower()
    if any(word in lower for word in WORDS):
        if ":" in text or "=" in text or "," in text or "：" in text:
            if "authorization" in lower or "cookie" in lower or "x-" in lower:
                text = compiled(_HEADER).sub(_hide_header, text)
            text = _hide_values(_ASSIGNMENT, text)
            if "value" in lower:
                text = _hide_values(_NAMED, text)
        if "-" in text:
            text = _hide_values(_FLAG, text)
        if any(compiled(sign).search(text) for sign in _SIGNS_OF_PAIRS):
            text = _hide_values(_PAIR, text)
        if "bearer" in lower or "basic" in lower or "token " in lower:
            text = compiled(_SCHEME).sub(_hide_scheme, text)
        text = hide_said(text, lower)
    if "login" in lower or "curl" in lower:
        text = compiled(_LOGIN).sub(lambda match: (match["lead"] or match["curl"]) + HIDDEN, text)
    if ("login" in lower or "wandb" in lower) and b"0" * 32 in text.encode("ascii", "replace").translate(_AS_DIGITS):
        text = compiled(rf"(?<![\w-]){HEX}+(?![\w-])").sub(_hide_hex, text)
    return text


def _hide_hex(match: re.Match[str]) -> str:
    """A key of W&B is as long as a commit; it is one where somebody logs in, and under the name of a key beside
    that."""
    before = match.string[max(0, match.start() - 200) : match.start()].lower()
    if compiled(_LOGS_IN).search(before):
        return HIDDEN
    at = max(before.rfind("wandb"), before.rfind("login"))
    # a call or a mapping that goes on in indented lines is one statement
    together = all(line.startswith((" ", "\t")) for line in before[at:].split("\n")[1:])
    return HIDDEN if at >= 0 and compiled(_IS_KEY).search(before, at) and together else match[0]


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
        at, name = match.end(), _full_name(match)
        if not noted(name):
            continue
        if secret_key(name) and (kind := compiled(_TYPE).match(text, at)):
            at = kind.end()
        value = _value_at(text, at, MAX_VALUE if secret_key(name) else MAX_RANDOM)
        if pattern is _FLAG:
            bare = value.strip("'\"")
            if bare.startswith("-") and not may_begin_with_a_dash(name, bare):
                continue
        shown = _shown(name, value)
        if shown is not None:
            parts += (text[done:at], shown)
            at += len(value)
            if pattern is _FLAG and may_have_more(name) and (more := compiled(_MORE_VALUES).match(text, at)):
                at = more.end()
            done = at
    return "".join((*parts, text[done:])) if parts else text


def _full_name(match: re.Match[str]) -> str:
    """The name without dashes; `forward pass: eager` is about a forward pass, `next token: the` about a next token."""
    name = (match["name"] or match["path"]).lstrip("-")
    if name.lower() in ("pass", "token") and ":" in match[0] and match.string[match.start() - 1 : match.start()] == " ":
        before = match.string[max(0, match.start() - 24) : match.start()].split("\n")[-1].split()
        if before and before[-1].isalnum():
            return f"{before[-1]}_{name}"
    return name


def may_begin_with_a_dash(name: str, word: str) -> bool:
    """Whether the word after an option of this name is its value although it looks like an option: `--password
    -abc`."""
    return len(word) > 3 and word[1] != "-" and compiled(_TAKES_VALUE).search(name) is not None


def may_have_more(name: str) -> bool:
    """Whether more than one word may follow an option of this name: `--passwords A B`."""
    lower = name.lower()
    return lower.endswith("s") and not lower.endswith("pass") and secret_key(name)


def _value_at(text: str, at: int, limit: int) -> str:
    match = compiled(_VALUE).match(text, at, at + limit)
    if match is None:
        return ""
    value = match[0]
    if value.endswith(_QUOTES):
        return value
    whole = compiled(_BRACKETED).match(text, at, at + limit) if limit == MAX_VALUE else None
    if whole is not None and len(whole[0]) >= len(value.rstrip(",)]}.")):
        return whole[0]
    if value == "-" and limit == MAX_VALUE and (values := compiled(_LIST).match(text, at, at + limit)):
        return values[0]
    if value[0] in "|>" and (begins := compiled(_BLOCK).match(text, at)):
        return _block(text[at : at + limit], begins.end() - at, begins["end"])
    following = compiled(_NEXT_NAME).search(value)  # `api_key=x,lr=0.1`
    return (value[: following.start()] if following else value).rstrip(",)]}.")


def _block(text: str, begin: int, end_of_line: str) -> str:
    """The lines of a value in YAML: those that are indented as far as the first of them."""
    if not text.startswith((" ", end_of_line), begin):  # most often: nothing that would have to be split
        return text[:begin].removesuffix(end_of_line)
    shown = text[begin:] if end_of_line == "\n" else compiled(r"[^'\"\n]*").match(text, begin)[0]  # type: ignore[index]
    lines = shown.split(end_of_line)
    first = next((line for line in lines if line.strip()), "")
    indent = " " * (len(first) - len(first.lstrip(" ")))
    kept = itertools.takewhile(lambda line: not line.strip() or (indent and line.startswith(indent)), lines)
    block = text[:begin] + end_of_line.join(kept)
    while block.endswith(end_of_line):
        block = block.removesuffix(end_of_line)
    return block


def _shown(name: str, value: str) -> str | None:
    """What stands in the text in place of this value; None where it stays."""
    bare = value.lstrip("rbfu") if value.endswith(_QUOTES) else value
    bare = bare.strip("'\"\\")
    if value.startswith("//") or not bare or compiled(_DONE).match(bare) or compiled(_COMPUTED).fullmatch(bare):
        return None
    shown = stands_for(name, bare)
    return shown if shown in (None, HIDDEN) else value.replace(bare, shown)


def _hide_scheme(match: re.Match[str]) -> str:
    """`Bearer x`, `Basic x`, but not "basic understanding"."""
    value = match["value"]
    if re.search(r"\d|[a-z][A-Z]|=$", value) is None or (
        match["kind"].lower() == "token" and not random_looking(value)
    ):
        return match[0]
    return f"{match['kind']}{match['gap']}{HIDDEN}"
