"""What is looked at first to spare a pattern never changes the answer."""

from __future__ import annotations

import re
from re import _parser  # type: ignore[attr-defined]

from canaries import BASE62, BY_NAME, BY_VALUE, HEX40, IN_TEXT, ORDINARY_NAMES, ORDINARY_TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from perfagent.redaction import (
    arguments,
    free_text,
    names,
    redacted_text,
    remembered,
    secret_key,
    structure,
    text,
    values,
)
from perfagent.redaction.names import compiled, random_looking, weak_key

UNUSUAL = "\u212a\u017f\u0130\u0131é\0\n"
"""The Kelvin sign and the long s, which fold to k and s, and what else patterns read in ways of their own."""
PIECES = (
    *BY_NAME, *ORDINARY_NAMES[:40], *(piece for piece, _ in names._KINDS), *names._WEAK_ENDS, *BY_VALUE.values(), *UNUSUAL,
    "Basic ", "bearer ", "login ", "curl -u ", "x-", "://", "://user:word@", "?sig=", "--", "-", "_", ".", ":", "=", ",",
    ", ", " ", "'", '"', "/", "@", "plainword", "1.2",
    "name: ", "value: ", "--opts ", "LOGGER.API_KEY ", "wandb login ", "wandb.login(key=", "proxy", "me:hunter2", "https://",
    "pass: ", ">-\n  ", HEX40,
    "password is ", "api key ", "token ", "| api_key | ", "password ..... ", "('HF_TOKEN', '", "user, password = 'me', '",
    "<pwd>", "</pwd>", "ENV HF_TOKEN ", "mysql -p", " -p ", "hunter2secret", "密码：", BASE62, "api_key: str = ",
    "auth=('me', 'x')", "redis-cli -a ", ".login('me', '", "['password', '", "')", "'username': 'me', 'key': '", "[input_value='",
    "\n  ", "mot de passe ", "set -x HF_TOKEN ",
)  # fmt: skip
MODULES = (arguments, names, remembered, free_text, structure, text, values)
some_text = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=8).map("".join)


def unhurried_name(key: str) -> bool:
    every = re.compile("|".join(kind for _, kind in names._KINDS), re.IGNORECASE)
    return every.search(key) is not None and re.search(names._ORDINARY, key, re.IGNORECASE) is None


def unhurried_text(shown: str) -> str:
    """Every pattern for what may hold a secret, one after the other."""
    found = text._encodable(shown)
    if len(found) < 6:
        return found
    for _, pattern in values._KINDS:
        found = re.compile(pattern, re.DOTALL).sub(names.HIDDEN, found)
    if "://" in found:
        found = re.sub(text._USERINFO, rf"\g<scheme>\g<user>:{names.HIDDEN}@", found)
        found = re.sub(text._WITH_SLASHES, rf"\g<scheme>\g<user>:{names.HIDDEN}@", found)
        found = re.sub(text._ALONE, rf"\g<scheme>{names.HIDDEN}@", found)
        found = re.sub(text._ON_THE_WEB, rf"\g<scheme>{names.HIDDEN}@", found)
    found = re.sub(text._QUERY, rf"\g<lead>{names.HIDDEN}", found)
    found = re.sub(free_text._OF_A_PROGRAM, free_text._value_only, found)
    found = re.sub(free_text._SHORT, free_text._short, found)
    found = re.sub(free_text._OTHER_LETTERS, free_text._value_only, found)
    lower = found.lower()
    if any(word in lower for word in names.WORDS):
        if any(word in lower for word in ("authorization", "cookie", "x-")):
            found = re.sub(text._HEADER, text._hide_header, found)
        found = text._hide_values(text._ASSIGNMENT, found)
        found = text._hide_values(text._NAMED, found)
        found = text._hide_values(text._FLAG, found)
        found = text._hide_values(text._PAIR, found)
        if any(word in lower for word in ("bearer", "basic", "token ")):
            found = re.sub(text._SCHEME, text._hide_scheme, found)
        for pattern, shown_as in (
            (free_text._SENTENCE, free_text._in_sentence), (free_text._TABLE, free_text._in_table),
            (free_text._CALL, free_text._under_name),
            (free_text._PAIR_IN_BRACKETS, free_text._in_pair), (free_text._LOGS_IN, free_text._value_only),
            (free_text._KAGGLE, free_text._value_only),
            (free_text._VALIDATED, free_text._under_name), (free_text._TUPLE, free_text._in_tuple),
            (free_text._TAG, free_text._under_name),
            (free_text._SHELL, free_text._under_name),
            (free_text._LONG_WORD, free_text._beside_a_name),
        ):  # fmt: skip
            found = re.sub(pattern, shown_as, found)
    if "login" in lower or "curl" in lower:
        found = re.sub(text._LOGIN, lambda match: (match["lead"] or match["curl"]) + names.HIDDEN, found)
    return re.sub(rf"(?<![\w-]){names.HEX}+(?![\w-])", text._hide_hex, found)


@settings(max_examples=400, deadline=None)
@given(some_text)
def test_a_name_is_judged_as_by_all_patterns_together(key: str) -> None:
    assert secret_key(key) == unhurried_name(key)
    assert weak_key(key) == (re.search(names._WEAK, key) is not None)


def test_every_known_name_is_judged_as_by_all_patterns_together() -> None:
    for name in (*BY_NAME, *ORDINARY_NAMES):
        folded = name.replace("k", "\u212a").replace("s", "\u017f")
        for key in (name, name.upper(), f"my_{name}", f"{name}s", folded, f"{name}\n"):
            assert secret_key(key) == unhurried_name(key), key
            assert weak_key(key) == (re.search(names._WEAK, key) is not None), key


@settings(max_examples=400, deadline=None)
@given(some_text)
def test_a_text_is_hidden_as_by_all_patterns_one_after_the_other(shown: str) -> None:
    assert redacted_text(shown) == unhurried_text(shown)


def test_every_known_text_is_hidden_as_by_all_patterns_one_after_the_other() -> None:
    secrets = [*BY_VALUE.values(), *(line.format(secret) for line, secret in IN_TEXT), *BY_NAME]
    for shown in (
        *secrets,
        *ORDINARY_TEXT,
        *(piece for secret in secrets for piece in (secret[:14], secret[:15], secret[1:])),
    ):
        assert redacted_text(shown) == unhurried_text(shown), shown


@settings(max_examples=400, deadline=None)
@given(st.text("abcXYZ0123456789/_~.=-+", max_size=210) | some_text)
def test_a_word_looks_random_only_in_the_form_of_one(word: str) -> None:
    assert not random_looking(word) or compiled(names._WORD).fullmatch(word)


def test_no_kind_of_secret_is_shorter_than_the_text_that_is_passed_over() -> None:
    widths = [_parser.parse(pattern).getwidth()[0] for _, pattern in values._KINDS]
    assert min(widths) == values.SHORTEST


def test_importing_redaction_compiles_no_pattern() -> None:
    assert not [name for module in MODULES for name, value in vars(module).items() if isinstance(value, re.Pattern)]
