"""Removes secrets from text and from lists of words: what looks like one (values.py), what is known to be one
(remembered.py), what is assigned to a secret name (here), and what else a text says of one (shapes.py).
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

from perfagent.redaction.names import HIDDEN, WORDS, compiled, noted, random_looking, secret_key, stands_for
from perfagent.redaction.remembered import hide_remembered, learn
from perfagent.redaction.shapes import FIRST_SHAPES, SHAPES, Shape
from perfagent.redaction.values import hide_known

__all__ = ["redacted_arguments", "redacted_lines", "redacted_text"]

MAX_TEXT = 20_000
MAX_LINE = 500
MAX_VALUE, MAX_RANDOM = 5_000, 220
MAX_READ = 200_000
"""Characters of one text that are looked at; of what is longer, the beginning and the end are."""
BETWEEN = "\x1f"
"""Stands before each word of a list; patterns read it as a blank."""

_ASSIGNMENT = (
    r"(?<![\w.-])(?P<name>(?:[^\W\d]|-)[\w.-]{0,300}+)"
    r"(?P<gap>\\?['\"]?\]?[^\S\x1f]{0,20}(?:=[=>]?+|!=|:=?+|：)[^\S\x1f]{0,20})"
    # `api_key: str | None = "X"` in Python, `api_key: !!str X` in YAML
    r"(?:(?:Optional\[)?(?:\w{1,20}\.)?(?:str|bytes|SecretStr)\]?(?:\s?\|\s?None)?\s{0,3}=(?!=)\s{0,3}|!!\w{1,20}\s{1,20})?(?=\S)"
)
_NAMED = (
    r"(?i)\b(?:name|key)['\"]?\s{0,20}[:=]\s{0,20}['\"]?(?P<name>[\w.-]{1,100}+)['\"]?\s{0,40},?\s{0,40}"
    r"['\"]?\bvalue['\"]?\s{0,20}[:=]\s{0,20}(?=\S)"
)
"""`{"name": "HF_TOKEN", "value": X}`, as Kubernetes lists variables."""
_FLAG = r"(?<![^\s'\"])(?P<name>--?[A-Za-z][\w.-]*+)(?P<gap>\s+|['\"],\s*(?=['\"]))(?=\S)"
"""An option of a command line, also as Python prints a list: `Command '['train.py', '--api-key', 'X']' returned ...`."""
_PAIR = (
    r"(?<!\S)(?:(?:--(?:opts?|set|overrides?|cfg-options)|setenv|ENV|set -\w{1,3}|setx)\s{1,20}(?P<name>[A-Za-z_][\w.-]{0,100}+)"
    r"|(?P<path>[A-Z][A-Z0-9_]{0,60}+\.[A-Z][A-Z0-9_.]{0,100}+))[ \t\x1f]{1,20}(?=[^\s=:-])"
)
"""`--opts api_key X`, `setenv API_KEY X`, and `LOGGER.API_KEY X` wherever it stands: yacs takes names and values in turn,
and writes names so."""
_QUOTED = r"\\\"[^\"\n\x1f]*?\\\"|[rbfu]?'(?:[^'\\\n\x1f]|\\.)*+'|[rbfu]?\"(?:[^\"\\\n\x1f]|\\.)*+\""
_WORD = r"(?P<word>(?:(?!,['\"]?[A-Za-z_][\w.-]{0,60}['\"]?[=:])[^\s;&'\"])++)"  # of `api_key=x,lr=0.1` the x
_INSIDE = r"'(?:[^'\\\n]|\\.)*+'|\"(?:[^\"\\\n]|\\.)*+\"|[^\n'\"()\[\]{}]"
_IN_BRACKETS = rf"[(\[{{](?:{_INSIDE}|[(\[{{][^\n()\[\]{{}}]*+[)\]}}])*+[)\]}}]"
_BRACKETED = rf"[\w.]{{0,200}}+[(\[{{](?:{_INSIDE}|{_IN_BRACKETS})*+[)\]}}](?=[\s;&'\",)\]}}]|$)"
"""`auth=("me", "X")`, `cookies={"sid": "X"}`, `password=SecretStr("X")`: hidden up to the last bracket. With the first
word alone the password of `auth=` stayed visible."""
_BLOCK = "|".join(
    rf"[|>][0-9+-]{{0,2}}[ \t]*{end}(?:[ \t]*{end})*"
    rf"(?P<{indent}>[ \t]+){letter}*(?:{end}(?:(?P={indent}){letter}*|[ \t]*(?={end})))*"
    for indent, end, letter in (("indent", r"\n", r"[^\n]"), ("printed", r"\\n", r"(?:(?!\\n)[^'\"\n])"))
)
"""A value of several lines in YAML, also as Python and JSON print it: the lines that are indented as far as the first."""
_YAML_LIST = r"-[ \t]+[^\n]*(?:\n[ \t]*-[ \t]+[^\n]*)*"
_SECRET_VALUE = f"{_QUOTED}|{_BLOCK}|{_YAML_LIST}|{_BRACKETED}|{_WORD}"
_OTHER_VALUE = f"{_QUOTED}|{_WORD}"
_MORE_VALUES = r"(?:,?[ \t\x1f]+(?!['\"]?-)['\"]?[^\s;&|'\",)\]]+['\"]?)*"
_COMPUTED = r"[A-Za-z_]\w*(?:\.\w+)+(?:\([^'\"]*\)|\[[^'\"]*\])"
"""A call or index by a dotted path without a text in it stays visible, since tracebacks are full of them:
`token = self.tokenizer.decode(ids)`, `token = self.vocab[word]`, `cls: torch.Size([1, 768])`."""
_DONE = r"\[redacted(?!\][\w-])"
"""Hidden before, and not a part of it only: `https://me:[redacted]@host`."""
_TAKES_ANY = r"(?i)passw|passphrase|pwd|secret|credential|(?:token|key)s?$|(?:^|[._-])(?:pass|pw)$"
_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits + "._+/@-")
"""A text of these alone is one word: nothing in it has a value, so it can only be a secret by itself."""


def redacted_text(text: str) -> str:
    """Text without what looks like a secret, by its value or by the name that it is assigned to; in the middle of what
    is longer than 20,000 characters something is left out."""
    text, missing = _ends(_encodable(text), MAX_READ)
    return _ends(_hide(text), MAX_TEXT, missing)[0] if len(text) >= 6 else text  # half a secret is known by nothing


def redacted_lines(lines: Iterable[str]) -> list[str]:
    """Lines of output, at most 500 characters of each. As one text, since a private key has many lines (and for
    speed)."""
    text = _encodable("\n".join(line[: 8 * MAX_LINE] for line in lines))
    return [line[:MAX_LINE] for line in _hide(text).split("\n")]


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """Redacts a command line, or a part of one, where a word may name the next. Returns as many words."""
    words = [word if len(word) < 20 else _without_random(word) for word in arguments]
    line = "".join(f"{BETWEEN}{word}" for word in words)
    shown = _hide(_encodable(line)).split(BETWEEN)[1:] if len(line) <= MAX_READ else []
    if len(shown) != len(words):  # a secret took several words, as a private key does
        return [redacted_text(word) for word in words]
    return [_ends(one, MAX_TEXT)[0] for one in shown]


def _without_random(word: str) -> str:
    name, _, value = word.partition("=")
    if random_looking(value):
        return f"{name}={HIDDEN}"
    return HIDDEN if random_looking(word) else word


def _encodable(text: str) -> str:
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")
    return text.replace("\0", "�") if "\0" in text else text


def _ends(text: str, room: int, missing: int = 0) -> tuple[str, int]:
    """Beginning and end of a text, and how many characters are missing, with those before."""
    if len(text) <= room and not missing:
        return text, 0
    head, tail = text[: room // 2], text[-room // 2 :]
    missing += len(text) - len(head) - len(tail)
    return f"{head}\n[... {missing} characters left out ...]\n{tail}", missing


def _hide(text: str) -> str:
    text = hide_remembered(hide_known(text))  # in this order: one that is remembered may be a part of another
    if _WORD_CHARACTERS.issuperset(text):
        return text
    lower = text.lower()
    text = _shaped(FIRST_SHAPES, text, lower)
    if any(word in lower for word in WORDS):
        for signs, pattern in (("=:：", _ASSIGNMENT), (("value",), _NAMED), ("-", _FLAG), (" \t\x1f", _PAIR)):
            if any(sign in lower for sign in signs):
                text = _hide_values(pattern, text)
        text = _shaped(SHAPES, text, lower)
    return text


def _shaped(shapes: Sequence[Shape], text: str, lower: str) -> str:
    for shape in shapes:
        if not shape.signs or any(sign in lower for sign in shape.signs):
            text = compiled(shape.pattern).sub(shape.shown, text)
    return text


def _hide_values(pattern: str, text: str) -> str:
    """Names and values, one after the other; what is no secret is looked into: `client = Client(api_key="x")`."""
    parts: list[str] = []
    search = compiled(pattern).search
    done = at = 0
    while (match := search(text, at)) is not None:
        at, name = match.end(), (match["name"] or match["path"]).lstrip("-")
        if name.lower() in ("pass", "token") and ":" in match[0]:  # `next token: the` is about a next token
            before = compiled(r"\w+ +$").search(text, max(0, match.start() - 24), match.start())
            name = f"{before[0] if before else ''}{name}"
        if not noted(name):
            continue
        value = _value_at(text, match, name)
        if pattern is _FLAG and value.lstrip("'\"").startswith("-") and not compiled(_TAKES_ANY).search(name):
            continue  # the next option, and no `--password -abc`
        shown = _shown(name, value)
        if shown == HIDDEN and BETWEEN in text:
            learn(name, value, digits=False)
        if shown is not None:
            parts += (text[done:at], shown)
            at = done = at + len(value)
            if (
                pattern is _FLAG
                and name.lower().endswith("s")
                and not name.lower().endswith("pass")
                and secret_key(name)
            ):
                more = compiled(_MORE_VALUES).match(text, at)  # `--passwords A B`
                at = done = more.end() if more else at
                parts.append(re.sub(r"[^\s,'\"]+", HIDDEN, more[0]) if more else "")
    return "".join((*parts, text[done:])) if parts else text


def _value_at(text: str, name_and_gap: re.Match[str], name: str) -> str:
    at, before = name_and_gap.end(), name_and_gap.start()
    if BETWEEN in (text[at - 1], text[before - 1 : before]):  # of a list: a whole word, or all behind `--name=`
        end = text.find(BETWEEN, at)
        return text[at : len(text) if end < 0 else end]
    secret = secret_key(name)
    match = compiled(_SECRET_VALUE if secret else _OTHER_VALUE).match(
        text, at, at + (MAX_VALUE if secret else MAX_RANDOM)
    )
    if match is None:
        return ""
    return match[0].rstrip(",)]}.") if match.lastgroup == "word" else match[0]


def _shown(name: str, value: str) -> str | None:
    """What stands in the text in place of this value; None where it stays."""
    bare = value.lstrip("rbfu") if value.endswith(("'", '"')) else value
    bare = bare.strip("'\"\\")
    if value.startswith("//") or not bare or compiled(_DONE).match(bare) or compiled(_COMPUTED).fullmatch(bare):
        return None
    shown = stands_for(name, bare)
    return shown if shown in (None, HIDDEN) else value.replace(bare, shown)
