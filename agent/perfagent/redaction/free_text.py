"""Removes secrets that are not written as `name = value`: in sentences, tables, calls, tags and commands of a shell."""

from __future__ import annotations

import re
from collections.abc import Callable

from perfagent.redaction.names import HIDDEN, compiled, may_stay, random_looking, secret_key

__all__ = ["hide_said", "hide_short_options", "is_short_password"]

_QUOTED = r"'[^'\n]{1,500}'|\"[^\"\n]{1,500}\"|`[^`\n]{1,500}`"
_SENTENCE = (
    r"(?i)(?<![\w.-])(?P<name>pass(?:word|phrase|wd)|mot de passe|secret(?:[ _-](?:access[ _-])?key)?"
    r"|(?:api|access|secret|private|auth|account|admin)[ _-](?:key|token)|token|credentials?)"
    r"(?P<gap>[ \t]{1,3}(?:for|of)(?:[ \t]{1,3}[^\s,;:：]{1,100}){1,3}?(?:[ \t]{1,3}(?:is|was)[ \t]{1,3}|[:：][ \t]{1,3})"
    r"|(?:[ \t]{1,3}(?:provided|given|used|supplied))?"
    r"(?:[ \t]{1,3}(?:is|was)[ \t]{1,3}|[ \t]{0,3}(?:->|=>|→|!=|==|[:：])[ \t]{0,3}|[ \t]{1,3}))"
    rf"(?P<value>{_QUOTED}|[^\s'\"`,;()\[\]{{}}]{{1,500}})"
)
"""`invalid api key: X`, `the password is X`, `password for user me: X`, `token 'X' was refused`."""
_SIGNS_OF_SENTENCES = (
    "passw", "passphrase", "de passe", "secret", "credential", " key", "_key", "-key",
    *("token" + following for following in " \t-=!:"),
)  # fmt: skip
_MIXED = r"(?=[^\n]*?[A-Za-z])(?=[^\n]*?\d)[^\n]+"
_TABLE = (
    r"(?m)^[ \t|│┃║]*(?P<name>[A-Za-z_][\w-]{0,60}+(?:\.\w[\w-]{0,60}+){0,8}+)"
    r"(?P<gap>[ \t]{0,200}(?:[|│┃║]|\.{3,200}+)[ \t]{0,200}|[ \t]{2,200}|\t[ \t]{0,200})(?P<value>[^\s|│┃║\n][^|│┃║\n]{0,500})"
)
"""`  api_key ........ X` as Megatron prints its arguments, `| api_key | X |`, and columns of any other width."""
_CALL = r"[\w\])]\((?P<quote>['\"])(?P<name>[\w.-]{2,100})(?P=quote)(?P<gap>,\s{0,20}[rbf]?)(?P<value>" + _QUOTED + ")"
"""`os.environ.setdefault("HF_TOKEN", "X")`."""
_TUPLE = (
    r"(?m)^[ \t]{0,40}+(?P<name>[A-Za-z_]\w{0,50}(?:[ \t]{0,3},[ \t]{0,3}[A-Za-z_]\w{0,50}){1,5})(?P<gap>[ \t]{0,3}=[ \t]{0,3})"
    r"(?P<value>[^\n=]*?['\"][^\n]*)"
)
"""`user, password = "me", "X"`."""
_TAG = r"<(?P<name>[A-Za-z][\w.:-]{1,60})(?P<gap>>)(?P<value>[^<>\s][^<>\n]{0,500})(?=</)"
_SHELL = (
    r"(?m)(?:^|\s)(?:setenv|ENV|set -\w{1,3}|setx)[ \t]{1,3}(?P<name>\w{1,100})(?P<gap>[ \t]{1,20})"
    r"(?P<value>" + _QUOTED + r"|[^\s'\"]+)"
)
_OTHER_LETTERS = (
    r"(?P<name>密码|口令|密钥|令牌|パスワード|비밀번호|[Пп]ароль)(?P<gap>\s{0,3}(?:[:：=]|是|为)\s{0,3})"
    r"(?P<value>" + _QUOTED + r"|[^\s,，。;；'\"]{4,500})"
)
_PAIR_IN_BRACKETS = (
    r"(?:\(|\[(?:(?<=[(\[]\[)|(?<=\],\[)|(?<=\],\s\[)))"
    r"(?P<quote>['\"])(?P<name>[\w.-]{2,100})(?P=quote)(?P<gap>,\s{0,20}[rbf]?)"
    r"(?P<value>" + _QUOTED + r")(?=\s{0,5}[)\]])"
)
"""`[('password', 'X')]` and `[['user', 'me'], ['password', 'X']]`, as lists of pairs are printed; `['password',
'host']` alone is a list of names."""
_A_NAME = r"(?i)[a-z]+(?:[_.-][a-z]+)+|password|token|secret|cookie"
"""`one of ('access_token', 'refresh_token')`."""
_LOGS_IN = r"\.login\([^\n'\"()]{0,100}['\"][^'\"\n]{1,200}['\"],\s{0,20}(?P<value>" + _QUOTED + r")(?=\s{0,5}\))"
"""`smtp.login("me@example.org", "X")`."""
_KAGGLE = (
    r"['\"]username['\"]\s{0,5}:\s{0,5}['\"][^'\"\n]{1,100}['\"]\s{0,40},\s{0,40}['\"]key['\"]\s{0,5}:\s{0,5}"
    r"['\"](?P<value>[0-9a-f]{32})(?=['\"])"
)
"""`kaggle.json`: 32 digits as of a checksum, but beside a name."""
_VALIDATED = r"(?m)^(?P<name>[\w.-]{2,100})\n(?P<gap>[ \t]{2}[^\n]{0,300}\binput_value=)(?P<value>" + _QUOTED + ")"
"""What pydantic says of a setting that it refuses: its name is on the line before."""
_SPEAKS = (
    r"(?i)(?<![a-z])(?:passw\w{0,9}|secrets?|credentials?|token|(?:api|access)?[ _-]?keys?|auth\w{0,12}|login|bearer|jwt)"
    r"(?![a-z])|\[redacted\]"
)
_LONG_WORD = r"(?<![A-Za-z0-9+/_~.-])[A-Za-z0-9+/_~-]{20,200}={0,2}(?![A-Za-z0-9+/_~-])"

# Programs that take a password after -p (mysql without a space), and those that take a user next to it.
_OF_A_PROGRAM = (
    r"\b(?:(?:sshpass|htpasswd|mongo\w{0,10}|(?:docker|podman|az)\s{1,3}login)\b[^\n|;]{0,300}?\s-p[ =]?"
    r"|(?:mysql|mariadb)\w{0,10}\b[^\n|;]{0,300}?\s-p(?=\S)|redis-cli\b[^\n|;]{0,300}?\s-a\s{1,3})"
    r"(?P<value>" + _QUOTED + r"|[^\s'\"]+)"
)
_SHORT = r"(?<=\s)-p[ =](?P<value>" + _QUOTED + r"|[^\s'\"]+)"
_LETTERS_AND_DIGITS = r"(?=[^\s]*[A-Za-z])(?=[^\s]*\d)[^\s/\\.:,=_-]{6,}"
_ORDINARY_WORD = r"(?i)[a-z]+\d{1,2}|.*(?:gpu|rtx|cuda|node|[abhlptv]\d{2,3}(?!\d)).*"
"""`-p bfloat16`, `-p gpu2080ti`, `-p run12`: a precision, a partition, a folder."""
_OTHER_PROGRAMS = r"(?<![\w-])(?:mkdir|cp|srun|sbatch|salloc|squeue|sinfo|sacct|scontrol)\s"
_USER_BESIDE = r"(?:^|\s)(?:-u|-U|-l|--user(?:name)?|--login)(?:[ =]|$)"


def hide_said(text: str, lower: str) -> str:
    """Of a text that holds one of the words that such names are made of; lower: the same text in lower case."""
    for signs, pattern, hide in _SHAPES:
        if not signs or any(sign in lower for sign in signs) or (pattern is _SENTENCE and not text.isascii()):
            text = compiled(pattern).sub(hide, text)
    return text


def hide_short_options(text: str) -> str:
    """`-p X` in a command line that is printed; and names in Chinese, which have no letters of ours."""
    if "-p" in text or "-a " in text:
        text = compiled(_OF_A_PROGRAM).sub(_value_only, text)
        text = compiled(_SHORT).sub(_short, text)
    return text if text.isascii() else compiled(_OTHER_LETTERS).sub(_value_only, text)


def is_short_password(value: str, *, user: bool) -> bool:
    """Whether what follows `-p` is a password and no port, path, partition or precision. user: a user is named beside
    it."""
    value = value.strip("'\"")
    if compiled(_LETTERS_AND_DIGITS).fullmatch(value) and compiled(_ORDINARY_WORD).fullmatch(value) is None:
        return True
    return user and compiled(r"[\d.:]+|[~./\\].*|.*/.*|-.*").fullmatch(value) is None and not value.startswith(HIDDEN)


def _value_only(match: re.Match[str]) -> str:
    return match[0][: match.start("value") - match.start()] + HIDDEN + match[0][match.end("value") - match.start() :]


def _bare(match: re.Match[str]) -> str:
    return match["value"].strip("'\"` ")


def _in_sentence(match: re.Match[str]) -> str:
    name, value = match["name"].lower(), _bare(match).rstrip(".:!?)")
    if value.startswith((HIDDEN[:-1], "<")) or may_stay(name, value):
        return match[0]
    mixed = compiled(_MIXED).fullmatch(value) is not None and "/" not in value
    if name == "token" or name.startswith("credential"):  # a tokenizer's have numbers and quotes too
        hidden = mixed and len(value) >= 16 and "." not in value
    else:
        hidden = (mixed and len(value) >= 6) or (match["value"][0] in "'\"`" and len(value) >= 4)
    return match[0].replace(value, HIDDEN) if hidden else match[0]


def _in_table(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"].strip()
    if not secret_key(name) or may_stay(name, value) or value.startswith(HIDDEN[:-1]):
        return match[0]
    if name.lower() == "pass" and (match["gap"].isspace() or " " in value):  # `PASS   test_8gpu`, of a check
        return match[0]
    if match["gap"].isspace():
        first = compiled(r"[ \t]{2,}|\t").split(value, 1)[0]  # a row may have more columns
        told = compiled(_MIXED).fullmatch(first) is not None and " " not in first
        told = told and (len(first) >= 16 or not name.lower().endswith("token"))
        if value[0] in "([{=:" or not told:
            return match[0]  # a heading, a shape, a sentence
    return _value_only(match)


def _under_name(match: re.Match[str]) -> str:
    if not secret_key(match["name"]) or may_stay(match["name"], _bare(match)) or HIDDEN in match["value"]:
        return match[0]
    return _value_only(match)


def _in_pair(match: re.Match[str]) -> str:
    """Not of tokens, which tokenizers and their tests pair with words; nor where both are names."""
    value = _bare(match)
    if match["name"].lower() in ("token", "pass") or (compiled(_A_NAME).fullmatch(value) and secret_key(value)):
        return match[0]
    return _under_name(match)


def _in_tuple(match: re.Match[str]) -> str:
    names = [name.strip() for name in match["name"].split(",")]
    values = match["value"].split(",")
    if len(names) == len(values):
        pairs = zip(names, values, strict=True)
        values = [compiled(_QUOTED).sub(HIDDEN, value) if secret_key(name) else value for name, value in pairs]
    elif any(map(secret_key, names)):
        values = [compiled(_QUOTED).sub(HIDDEN, match["value"])]
    return match[0][: match.start("value") - match.start()] + ",".join(values)


def _beside_a_name(match: re.Match[str]) -> str:
    """A word of a random generator, in a line that speaks of keys or tokens."""
    if not random_looking(match[0]):
        return match[0]
    text, begin, end = match.string, max(0, match.start() - 200), match.end() + 100
    line = text[begin : match.start()].rpartition("\n")[2] + " " + text[match.end() : end].partition("\n")[0]
    return HIDDEN if compiled(_SPEAKS).search(line) else match[0]


def _short(match: re.Match[str]) -> str:
    text, begin = match.string, max(0, match.start() - 300)
    before = text[begin : match.start()].rpartition("\n")[2]
    if compiled(_OTHER_PROGRAMS).search(before):
        return match[0]
    line = before + text[match.end() : match.end() + 300].partition("\n")[0]
    user = compiled(_USER_BESIDE).search(line) is not None
    return _value_only(match) if is_short_password(match["value"], user=user) else match[0]


_SHAPES: tuple[tuple[tuple[str, ...], str, Callable[[re.Match[str]], str]], ...] = (
    (_SIGNS_OF_SENTENCES, _SENTENCE, _in_sentence),
    ((), _TABLE, _in_table),
    (("('", '("'), _CALL, _under_name),
    (("('", '("', "['", '["'), _PAIR_IN_BRACKETS, _in_pair),
    ((".login(",), _LOGS_IN, _value_only),
    (("username",), _KAGGLE, _value_only),
    (("input_value=",), _VALIDATED, _under_name),
    (("=",), _TUPLE, _in_tuple),
    (("</",), _TAG, _under_name),
    (("env", "set"), _SHELL, _under_name),
    ((), _LONG_WORD, _beside_a_name),
)
"""What a text must hold in lower case (nothing: any text), how a secret is written there, and what hides it."""
