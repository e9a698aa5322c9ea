"""How secrets are written that do not stand behind `name =`: addresses, headers, sentences, tables, calls, tags, commands
of a shell.

Each shape is a pattern, whose group `value` is hidden. Where it has a group `name`, that must be a secret's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from perfagent.redaction.names import HEX, HIDDEN, compiled, may_stay, random_looking, secret_key

__all__ = ["FIRST_SHAPES", "SHAPES", "Shape"]


def _value_only(match: re.Match[str]) -> str:
    begin, end = (at - match.start() for at in match.span("value"))
    return match[0][:begin] + HIDDEN + match[0][end:]


def _under_name(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"].strip("'\"` ")
    hidden = secret_key(name) and value and not value.startswith(HIDDEN) and not may_stay(name, value)
    return _value_only(match) if hidden else match[0]


class Shape(NamedTuple):
    """signs: what a text must hold in lower case, one of them; none: any text."""

    signs: tuple[str, ...]
    pattern: str
    shown: Callable[[re.Match[str]], str] = _under_name


_QUOTED = r"'[^'\n\x1f]{1,500}'|\"[^\"\n\x1f]{1,500}\"|`[^`\n\x1f]{1,500}`"
_SCHEME = r"(?<![a-zA-Z0-9+.-])[a-zA-Z][a-zA-Z0-9+.-]{0,30}://"
_PASSWORD_IN_ADDRESS = (
    rf"{_SCHEME}[^\s/@:'\"]{{0,200}}:(?P<value>[^\s/'\"]+(?=@)"
    # with a slash, as half of the keys of AWS have one; what follows the colon is no port then
    r"|(?!\d{1,5}[/?#]|\[redacted\])[^\s@:'\"]{1,200}/[^\s@:'\"]{0,200}(?=@[\w.\[-]+(?:[:/?#]|$|[\s'\"])))"
)
# The name of a user is no secret, so a short word alone is hidden only where it is usually a token: on the web.
_TOKEN_IN_ADDRESS = rf"(?:(?<![a-zA-Z0-9.-])https?://(?!git@)(?=[^\s/@:?&=#'\"]{{3,200}}@\w)|{_SCHEME}(?=[^\s/@:'\"]{{20}}))(?P<value>[^\s/@:'\"]+)(?=@)"
_QUERY = r"[?&](?i:sig|(?:q-)?signature|key|token|code|X-Amz-Signature|X-Amz-Credential|X-Goog-Signature)=(?P<value>[^&\s'\"]+)"
_HEADERS = r"(?i:(?:proxy-)?authorization|x-[a-z-]{0,60}(?:key|token)|(?:set-)?cookie)"
_HEADER = (
    rf"(?P<name>(?<=\x1f){_HEADERS}(?=\x1f)|{_HEADERS}(?!\x1f[^:=]))"
    r"(?:['\"]?\]?\s*(?:[:=]|,\s*['\"])\s*(?:[rbfu]{0,2}['\"])?|\x1f)(?P<value>Digest [^\n\x1f]+|[^\n'\"\x1f]+)"
)
_BEARER = r"(?i)\b(?P<kind>bearer|basic|token)[^\S\x1f]+(?P<value>[A-Za-z0-9+/._~-]{12,}=*)"
_MACHINE = r"\blogin\s+\S+\s+password\s+(?P<value>\S+)"
_CURL = r"\bcurl\b[^\n|;]{0,300}?\s(?:-u|--user)[ =\x1f]?['\"]?[^\s:'\"]+:(?P<value>[^\s'\"]+)"
_SENTENCE = (
    r"(?i)(?<![\w.-])(?P<name>pass(?:word|phrase|wd)|mot de passe|secret(?:[ _-](?:access[ _-])?key)?"
    r"|(?:api|access|secret|private|auth|account|admin)[ _-](?:key|token)|token|credentials?)"
    r"(?:[ \t]{1,3}(?:for|of)(?:[ \t]{1,3}[^\s,;:：]{1,100}){1,3}?(?:[ \t]{1,3}(?:is|was)[ \t]{1,3}|[:：][ \t]{1,3})"
    r"|(?:[ \t]{1,3}(?:provided|given|used|supplied))?"
    r"(?:[ \t]{1,3}(?:is|was)[ \t]{1,3}|[ \t]{0,3}(?:->|=>|→|!=|==|[:：])[ \t]{0,3}|[ \t]{1,3}))"
    rf"(?P<value>{_QUOTED}|[^\s'\"`,;()\[\]{{}}]{{1,500}})"
)
"""`invalid api key: X`, `the password is X`, `password for user me: X`, `token 'X' was refused`."""
_OF_SENTENCES = (
    "passw", "passphrase", "de passe", "secret", "credential", " key", "_key", "-key",
    *("token" + following for following in " \t-=!:→："),
)  # fmt: skip
_MIXED = r"(?=[^\n]*?[A-Za-z])(?=[^\n]*?\d)[^\n]+"
_TABLE = (
    r"(?<![^\n\x1f])[ \t|│┃║]*(?P<name>[A-Za-z_][\w-]{0,60}+(?:\.\w[\w-]{0,60}+){0,8}+)"
    r"(?P<gap>[ \t]{0,200}(?:[|│┃║]|\.{3,200}+)[ \t]{0,200}|[ \t]{2,200}|\t[ \t]{0,200})"
    r"(?P<value>[^\s|│┃║\n][^|│┃║\n\x1f]{0,500})"
)
"""`  api_key ........ X` as Megatron prints its arguments, `| api_key | X |`, and columns of any other width."""
_IN_BRACKETS = (
    r"(?:\(|\[(?:(?<=[(\[]\[)|(?<=\],\[)|(?<=\],\s\[)))(?P<quote>['\"])(?!(?i:token|pass)['\"])(?P<name>[\w.-]{2,100})"
    rf"(?P=quote),\s{{0,20}}[rbf]?(?P<value>{_QUOTED})(?=\s{{0,5}}[)\]])"
)
"""`os.environ.setdefault("HF_TOKEN", "X")`, `[('password', 'X')]` and `[['user', 'me'], ['password', 'X']]`, as lists of
pairs are printed; `['password', 'host']` alone is a list of names. Tokenizers and their tests pair tokens with words."""
_TUPLE = (
    r"(?<![^\n\x1f])[ \t]{0,40}+(?P<name>[A-Za-z_]\w{0,50}(?:[ \t]{0,3},[ \t]{0,3}[A-Za-z_]\w{0,50}){1,5})[ \t]{0,3}=[ \t]{0,3}"
    r"(?P<value>[^\n=]*?['\"][^\n]*)"
)
"""`user, password = "me", "X"`."""
_TAG = r"<(?P<name>[A-Za-z][\w.:-]{1,60})>(?P<value>[^<>\s][^<>\n]{0,500})(?=</)"
_SMTP = rf"\.login\([^\n'\"()]{{0,100}}['\"][^'\"\n]{{1,200}}['\"],\s{{0,20}}(?P<value>{_QUOTED})(?=\s{{0,5}}\))"
_VALIDATED = rf"(?<![^\n\x1f])(?P<name>[\w.-]{{2,100}})\n[ \t]{{2}}[^\n]{{0,300}}\binput_value=(?P<value>{_QUOTED})"
"""What pydantic says of a setting that it refuses: its name is on the line before."""
_SPEAKS = (
    r"(?i)(?<![a-z])(?:passw\w{0,9}|secrets?|credentials?|token|(?:api|access)?[ _-]?keys?|auth\w{0,12}|login|bearer|jwt)"
    r"(?![a-z])|\[redacted\]"
)
_LONG_WORD = r"(?<![A-Za-z0-9+/_~.-])(?P<value>[A-Za-z0-9+/_~-]{20,200}={0,2})(?![A-Za-z0-9+/_~-])"
_OF_A_PROGRAM = (
    r"\b(?:(?:sshpass|htpasswd|mongo\w{0,10}|(?:docker|podman|az)\s{1,3}login)\b[^\n|;]{0,300}?\s-p[ =\x1f]?"
    r"|(?:mysql|mariadb)\w{0,10}\b[^\n|;]{0,300}?\s-p(?=\S)|redis-cli\b[^\n|;]{0,300}?\s-a\s{1,3})"
    rf"(?P<value>{_QUOTED}|[^\s'\"]+)"
)
"""Programs that take a password after -p, mysql without a space."""
_SHORT = rf"(?<=\s)-p[ =\x1f](?P<value>{_QUOTED}|[^\s'\"]+)"
_LETTERS_AND_DIGITS = r"(?=[^\s]*[A-Za-z])(?=[^\s]*\d)[^\s/\\.:,=_-]{6,}"
_ORDINARY_WORD = r"(?i)[a-z]+\d{1,2}|.*(?:gpu|rtx|cuda|node|[abhlptv]\d{2,3}(?!\d)).*"
"""`-p bfloat16`, `-p gpu2080ti`, `-p run12`: a precision, a partition, a folder."""
_NO_WORD = r"[\d.:]+|[~./\\].*|.*/.*|-.*|\[redacted\].*"
_OTHER_PROGRAMS = r"(?<![\w-])(?:mkdir|cp|srun|sbatch|salloc|squeue|sinfo|sacct|scontrol)\s"
_USER_BESIDE = r"(?:^|\s)(?:-u|-U|-l|--user(?:name)?|--login)(?:[ =\x1f]|$)"
_LOGS_IN = (
    r"(?:login['\"]?(?:\s+--?[\w-]+(?:[=\s]\S+)?){0,4}\s+['\"]?"
    r"|login\(\s*['\"]?|-wandb\s+|\bwandb['\"]?\]?\s*[:=]\s*['\"]?)\Z"
)
_IS_KEY = r"(?<![\w-])(?:--)?(?:wandb[._-])?(?:api[._-])?(?:key|api)['\"]?\]?\s{0,5}[:=,]?\s{0,5}['\"]?\Z"


def _line(match: re.Match[str], before: int, after: int) -> tuple[str, str]:
    """What stands before and behind it in its line, so many characters at most."""
    text, begin, end = match.string, max(0, match.start() - before), match.end() + after
    return text[begin : match.start()].rpartition("\n")[2], text[match.end() : end].partition("\n")[0]


def _in_sentence(match: re.Match[str]) -> str:
    name, value = match["name"].lower(), match["value"].strip("'\"` ").rstrip(".:!?)")
    if not value or value.startswith((HIDDEN[:-1], "<")) or may_stay(name, value):
        return match[0]
    mixed = compiled(_MIXED).fullmatch(value) is not None and "/" not in value
    if name == "token" or name.startswith("credential"):  # a tokenizer's have numbers and quotes too
        hidden = mixed and len(value) >= 16 and "." not in value
    else:
        hidden = (mixed and len(value) >= 6) or (match["value"][0] in "'\"`" and len(value) >= 4)
    return match[0].replace(value, HIDDEN) if hidden else match[0]


def _in_table(match: re.Match[str]) -> str:
    name, value, blanks = match["name"].lower(), match["value"].strip(), match["gap"].isspace()
    if name == "pass" and (blanks or " " in value):  # `PASS   test_8gpu`, of a check
        return match[0]
    if blanks:
        first = compiled(r"[ \t]{2,}|\t").split(value, 1)[0]  # a row may have more columns
        one_word = " " not in first and compiled(_MIXED).fullmatch(first) is not None
        if value[0] in "([{=:" or not one_word or (len(first) < 16 and name.endswith("token")):
            return match[0]  # a heading, a shape, a sentence
    return _under_name(match)


def _in_tuple(match: re.Match[str]) -> str:
    names, values = match["name"].split(","), match["value"].split(",")
    if len(names) != len(values):
        names, values = [name for name in names if secret_key(name.strip())][:1], [match["value"]]
    shown = [
        compiled(_QUOTED).sub(HIDDEN, value) if secret_key(name.strip()) else value
        for name, value in zip(names, values, strict=False)
    ]
    return match[0][: match.start("value") - match.start()] + ",".join(shown or values)


def _beside_a_name(match: re.Match[str]) -> str:
    """A word of a random generator, in a line that speaks of keys or tokens."""
    return (
        HIDDEN if random_looking(match[0]) and compiled(_SPEAKS).search(" ".join(_line(match, 200, 100))) else match[0]
    )


def _behind_scheme(match: re.Match[str]) -> str:
    """`Bearer x`, `Basic x`, but not "basic understanding"."""
    value = match["value"]
    mixed = compiled(r"\d|[a-z][A-Z]|=$").search(value) is not None
    return _value_only(match) if mixed and (match["kind"].lower() != "token" or random_looking(value)) else match[0]


def _short(match: re.Match[str]) -> str:
    """`-p X` is a password and no port, path, partition or precision."""
    value, (before, behind) = match["value"].strip("'\""), _line(match, 300, 300)
    if compiled(_OTHER_PROGRAMS).search(before):
        return match[0]
    random = compiled(_LETTERS_AND_DIGITS).fullmatch(value) and not compiled(_ORDINARY_WORD).fullmatch(value)
    user = compiled(_USER_BESIDE).search(before + behind) and not compiled(_NO_WORD).fullmatch(value)
    return _value_only(match) if random or user else match[0]


def _beside_login(match: re.Match[str]) -> str:
    """A key of W&B is as long as a commit, one of Kaggle as a checksum. It is a key where somebody logs in, and under
    the name of a key beside that or beside the name of a user."""
    before = match.string[max(0, match.start() - 200) : match.start()].lower()
    if compiled(_LOGS_IN).search(before):
        return HIDDEN
    at = max(map(before.rfind, ("wandb", "login", "username")))
    # a call or a mapping that goes on in indented lines is one statement
    together = all(line.startswith((" ", "\t")) for line in before[at:].split("\n")[1:])
    return HIDDEN if at >= 0 and compiled(_IS_KEY).search(before, at) and together else match[0]


FIRST_SHAPES = (
    Shape(("://",), _PASSWORD_IN_ADDRESS, _value_only),
    Shape(("://",), _TOKEN_IN_ADDRESS, _value_only),
    Shape(("?", "&"), _QUERY, _value_only),
    Shape(("-p", "-a "), _OF_A_PROGRAM, _value_only),
    Shape(("-p",), _SHORT, _short),
    Shape(("authorization", "cookie", "x-"), _HEADER),
    Shape(("login",), _MACHINE, _value_only),
    Shape(("curl",), _CURL, _value_only),
    Shape(("login", "wandb", "username"), rf"(?<![\w-]){HEX}+(?![\w-])", _beside_login),
)
SHAPES = (
    Shape(("bearer", "basic", "token "), _BEARER, _behind_scheme),
    Shape(_OF_SENTENCES, _SENTENCE, _in_sentence),
    Shape((), _TABLE, _in_table),
    Shape(("('", '("', "['", '["'), _IN_BRACKETS),
    Shape((".login(",), _SMTP, _value_only),
    Shape(("input_value=",), _VALIDATED),
    Shape(("=",), _TUPLE, _in_tuple),
    Shape(("</",), _TAG),
    Shape((), _LONG_WORD, _beside_a_name),
)
"""Where the text holds a word that names of secrets are made of."""
