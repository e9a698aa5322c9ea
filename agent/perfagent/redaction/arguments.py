"""Removes secrets from command lines and other lists of words, where the word before a secret gives it away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from perfagent.redaction.free_text import is_short_password
from perfagent.redaction.names import HEX, HIDDEN, compiled, may_stay, random_looking, secret_key, stands_for
from perfagent.redaction.remembered import learn, learn_environment
from perfagent.redaction.text import may_begin_with_a_dash, may_have_more, redacted_text

__all__ = ["TAKES_PAIRS", "CommandLine", "redacted_arguments"]

_OPTION, _NAME = r"--?[A-Za-z][\w.-]*", r"[\w./@-]{1,300}"
TAKES_PAIRS = frozenset(("opt", "opts", "set", "override", "overrides", "cfg-options", "cfg_options"))
"""Options that names and values follow in turn, as yacs and mmengine have them."""
_HEADER = r"(?i)(?:proxy-)?authorization|x-[a-z-]*(?:key|token)|(?:set-)?cookie"
_SAYS_SOMETHING = frozenset(("curl", "authorization", "Authorization", "AUTHORIZATION", "cookie", "Cookie", "COOKIE"))
"""Words without a dash that tell of the next one."""
_NAMES_A_USER = frozenset(("-u", "-U", "-l", "--user", "--username", "--login"))
_ENDS_LIKE_A_KEY = r"(?i)(?:^|[._-])(?:key|api|wandb|(?:re)?login)$"


def redacted_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without secrets: `--api-key=X` and `--api-key X` by name, long random words by their entropy."""
    learn_environment()
    words = list(arguments)
    line = CommandLine(words)
    return [line.word(word) for word in words]


class CommandLine:
    """One list, word by word; what is no word is asked about by `name`."""

    def __init__(self, words: Sequence[Any], *, pairs: bool = False) -> None:
        self._words = words
        self._login: bool | None = None
        self._at = 0
        self._name = ""
        self._pairs, self._curl = pairs, False

    def name(self) -> str:
        """What the word before says that this one is."""
        name, self._name = self._name, ""
        self._at += 1
        return name

    def word(self, word: str) -> str:
        """The same word without a secret."""
        name = self.name()
        if not (name or self._pairs) and len(word) < 20 and word.isidentifier() and word not in _SAYS_SOMETHING:
            return redacted_text(word)  # as most words of most lists: neither a name of anything nor a secret
        shown = self._value(name, word) if name else None
        if shown is None and len(word) >= 32 and compiled(HEX).fullmatch(word) and self._logs_in():
            shown = HIDDEN
        if shown is None:
            shown = self._other(word)
        return shown

    def _value(self, name: str, word: str) -> str | None:
        """What is shown of a word that follows a name; None where it says nothing, or is the next option."""
        if word.startswith("-") and compiled(_OPTION).fullmatch(word) and not may_begin_with_a_dash(name, word):
            return None
        if may_have_more(name):
            self._name = name
        if name == "p":
            return HIDDEN if is_short_password(word, user=self._names_a_user()) else None
        return word if secret_key(name) and may_stay(name, word) else _learned(name, word)

    def _other(self, word: str) -> str:
        head, equals, value = word.partition("=")
        bare = head.lstrip("-+~")
        if equals and compiled(_NAME).fullmatch(bare):
            shown = self._assigned(bare, value)
            return redacted_text(word) if shown is None else f"{head}={shown}"
        if not equals:
            self._notice(word, bare)
        return HIDDEN if random_looking(word) else redacted_text(word)

    def _assigned(self, name: str, value: str) -> str | None:
        if random_looking(value):
            return HIDDEN
        if len(value) >= 32 and compiled(HEX).fullmatch(value) and compiled(_ENDS_LIKE_A_KEY).search(name):
            return HIDDEN if self._beside_a_login() else stands_for(name, value)
        return _learned(name, value)

    def _notice(self, word: str, bare: str) -> None:
        """Remembers what the word says about the next one."""
        if word.startswith("-"):
            self._pairs = bare in TAKES_PAIRS
            self._name = "user" if bare == "u" and self._curl else bare
        elif word.endswith("curl"):
            self._curl = True
        elif self._pairs or ("." in word and word.isupper()):  # LOGGER.API_KEY, as yacs writes names
            self._name = word if secret_key(word) else ""
        elif "-" in word or word in _SAYS_SOMETHING:
            self._name = word if compiled(_HEADER).fullmatch(word) else ""

    def _logs_in(self) -> bool:
        """Whether these digits are a key and no commit: `wandb login X`, `--wandb X`, and `--key X` beside such
        words."""
        before = [word for word in self._words[max(0, self._at - 4) : self._at - 1] if isinstance(word, str)]
        if "login" in before:
            return True
        named = bool(before) and compiled(_ENDS_LIKE_A_KEY).search(before[-1].lstrip("-")) is not None
        return named and self._beside_a_login()

    def _names_a_user(self) -> bool:
        return any(isinstance(word, str) and word.partition("=")[0] in _NAMES_A_USER for word in self._words)

    def _beside_a_login(self) -> bool:
        if self._login is None:
            says = compiled("wandb|login", re.IGNORECASE)
            self._login = any(isinstance(word, str) and says.search(word) is not None for word in self._words)
        return self._login


def _learned(name: str, value: str) -> str | None:
    """As `stands_for`; what is hidden is known from then on."""
    shown = stands_for(name, value)
    if shown == HIDDEN:
        learn(name, value, digits=False)
    return shown
