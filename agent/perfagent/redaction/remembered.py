"""Removes secrets that this process is known to hold, wherever they appear, also without a name next to them.

`print(os.environ["DB_PASSWORD"])`, an exception that quotes its arguments, a run that is named after a secret. Learned
are values of the environment under secret names, passwords in addresses there, and what a configuration or a command
line has under such a name. They stay in this process's memory, where they were before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from perfagent.redaction.names import HEX, HIDDEN, compiled, random_looking, secret_key, weak_key

__all__ = ["forget", "hide_remembered", "learn", "learn_environment"]

MOST = 64
_IS_A_VALUE = r"passw|passphrase|pwd|secret|key|token|(?:^|[._-])(?:pass|pw|pat)$|jwt"
"""A secret's name holds one of these: AUTH_MODE=required and SESSION_ID say more of how than of what."""
_SAYS_OF_IT = (
    r"(?:^|[._-])(?:name|file(?:name)?|path|dir|folder|env|var(?:iable)?|region|type|kind|mode|provider|backend|url|uri|host|version"
    r"|algorithm|policy|ttl|arn|ref)$"
)
"""SECRET_NAME=training-cluster-2 and AWS_SECRET_REGION=us-east-1 stand in logs for good reasons."""
_NO_VALUE_BEGINS = tuple("/~.<[{$%")
_NO_VALUE = r"[A-Za-z]:\\|.*://|.*\.(?:json|ya?ml|toml|txt|pem|crt|key|env|ini|cfg)$"
"""Paths, addresses, references to another place, and special tokens."""
_IN_ADDRESS = r"://[^\s/@:'\"]{0,200}:(?!\d{1,5}[/?#])(?P<word>[^\s@:'\"]+)@"

_values: tuple[str, ...] = ()
_environment: Mapping[Any, Any] | None = None


def learn_environment(variables: Mapping[str, str] | None = None) -> None:
    """Takes in what the environment holds now: a script may have read a file of secrets into it. 2 µs where nothing
    changed."""
    global _environment
    if variables is None:
        now: Mapping[Any, Any] = getattr(os.environ, "_data", {})
        if now == _environment:
            return
        _environment = dict(now)
        variables = os.environ
    for name, value in list(variables.items()):
        learn(name, value)
        if random_looking(value) and weak_key(name):
            _keep(value)
        if "://" in value and "@" in value:
            for found in compiled(_IN_ADDRESS).finditer(value):
                if _memorable(found["word"]):
                    _keep(found["word"])


def learn(name: str, value: str, *, digits: bool = True) -> None:
    """Remembers a value if its name says that it is a secret and it cannot be taken for an ordinary word.

    digits: also one of hexadecimal digits alone, which may be a commit as well.
    """
    if not _memorable(value) or not secret_key(name):  # in this order: few values need a look at their names
        return
    named = compiled(_IS_A_VALUE, re.IGNORECASE).search(name) is not None
    named = named and compiled(_SAYS_OF_IT, re.IGNORECASE).search(name) is None
    if named and (digits or compiled(HEX).fullmatch(value) is None):
        _keep(value)


def hide_remembered(text: str) -> str:
    """The text without them."""
    if _environment is None:
        learn_environment()
    for value in _values:
        if value in text:
            text = text.replace(value, HIDDEN)
    return text


def forget() -> None:
    """As in a process that has just begun."""
    global _values, _environment
    _values, _environment = (), None


def _memorable(value: str) -> bool:
    if not 8 <= len(value) <= 5000 or "\0" in value or value.startswith(_NO_VALUE_BEGINS):
        return False
    mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return (mixed or len(value) >= 16) and compiled(_NO_VALUE).match(value) is None


def _keep(value: str) -> None:
    global _values
    if value not in _values and len(_values) < MOST:
        _values = tuple(sorted((*_values, value), key=len, reverse=True))  # the longest first: one may hold another
