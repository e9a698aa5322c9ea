"""Secrets of every common kind, in every place where a training job shows them; and what only looks like one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from canaries import (
    BASE62,
    BY_NAME,
    BY_VALUE,
    HEX40,
    IN_ARGUMENTS,
    IN_TEXT,
    LISTS,
    NESTED,
    ORDINARY_ARGUMENTS,
    ORDINARY_LISTS,
    ORDINARY_NAMES,
    ORDINARY_TEXT,
)

from perfagent.redaction import HIDDEN, redacted, redacted_arguments, redacted_text, secret_key


@pytest.mark.fault
@pytest.mark.parametrize("kind", BY_VALUE)
def test_x10_what_looks_like_a_secret_is_hidden_anywhere(kind: str) -> None:
    canary = BY_VALUE[kind]
    places = ("{}", "using {} now", "value={}", '{{"x": "{}"}}', "https://x.org/{}?a=b")
    for text in (place.format(canary) for place in places):
        assert canary not in redacted_text(text), text
        assert HIDDEN in redacted_text(text)
    assert canary not in str(redacted({"nested": [{"deep": (canary,)}]}))
    found = redacted_arguments(["train.py", f"--thing={canary}", canary])
    assert (canary in " ".join(found), len(found)) == (False, 3)


@pytest.mark.fault
@pytest.mark.parametrize("key", BY_NAME)
def test_x10_what_is_called_a_secret_is_hidden(key: str) -> None:
    """Whatever it looks like."""
    assert redacted({key: "plainword"}) == {key: HIDDEN}
    assert redacted([[key, "plainword"]]) == [[key, HIDDEN]]
    for text in (f"{key}=plainword", f"'{key}': 'plainword'", f"{key}: plainword", f"Config(x=1, {key}='plainword')"):
        assert "plainword" not in redacted_text(text), text
    assert "plainword" not in " ".join(redacted_arguments([f"--{key}=plainword", f"{key}=plainword", "x"]))
    assert redacted_arguments([f"--{key}", "plainword", "--lr", "1"]) == [f"--{key}", HIDDEN, "--lr", "1"]
    assert "plainword" not in redacted_text(f"python train.py --{key} plainword --lr 1")
    folded = key.replace("k", "\u212a").replace("s", "\u017f")  # to which the Kelvin sign and the long s fold
    assert all(map(secret_key, (key.upper(), f"my_{key}", f"{key}\n", folded)))


@pytest.mark.fault
@pytest.mark.parametrize(("text", "secret"), IN_TEXT)
def test_x10_a_secret_in_its_surroundings_is_hidden_alone(text: str, secret: str) -> None:
    whole = text.format(secret)
    found = redacted_text(whole)
    assert secret not in found
    assert HIDDEN in found
    for nested in ({"lines": whole.split("\n")}, {"traceback": whole}, ["x", whole]):
        assert secret not in str(redacted(nested)).replace("\\\\", "\\"), nested
    before, after = text.format("\0").split("\0")
    for kept in (before.split(" ")[0][:12], after.strip("'\")}] ")):
        assert kept in found or "cookie" in text  # of a cookie nothing stays


@pytest.mark.fault
@pytest.mark.parametrize(("words", "secret"), IN_ARGUMENTS)
def test_x10_a_secret_in_a_command_line_is_hidden(words: list[str], secret: str) -> None:
    line = filled(words, secret)
    found = redacted_arguments(line)
    assert HIDDEN in " ".join(found)
    kept = [word for word in line if secret not in word and word not in ("first", "second")]
    assert [word for word in found if HIDDEN not in word] == kept
    for key in ("command", "argv", "args", "overrides", "anything"):
        assert secret not in str(redacted({key: line})), key
        assert secret not in str(redacted({"nested": [SimpleNamespace(**{key: tuple(line)})]})), key
    assert secret not in redacted_text(" ".join(line))
    assert secret not in str(redacted({"lines": ["$ " + " ".join(line)]}))


def filled(structure: Any, secret: str) -> Any:
    """The structure with the secret in its place."""
    if isinstance(structure, str):
        return structure.replace("{}", secret)
    if isinstance(structure, dict):
        return {key: filled(item, secret) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(filled(item, secret) for item in structure)
    return structure


@pytest.mark.fault
@pytest.mark.parametrize(("structure", "secret"), [*NESTED, *LISTS])
def test_x10_a_secret_in_a_configuration_is_hidden(structure: Any, secret: str) -> None:
    """As an object, and in what Python and JSON print of it."""
    given = filled(structure, secret)
    found = [str(redacted(shown)) for shown in (given, {"config": SimpleNamespace(**given)}, [given, 1])]
    if (structure, secret) in NESTED:
        for shown in (repr(given), json.dumps(given, indent=2)):
            found += [redacted_text(shown), str(redacted({"lines": shown.split("\n")}))]
    assert [text for text in found if secret in text or HIDDEN not in text] == []


@pytest.mark.fault
def test_x10_of_texts_and_arguments_only_the_secret_is_hidden() -> None:
    for text, shown in (
        ("user='me:hunter2secret', lr=1", f"user='me:{HIDDEN}', lr=1"),
        ("    password, name = 'hunter2', 'resnet50'", f"    password, name = {HIDDEN}, 'resnet50'"),
        ("a:\n  api_key: |\n    x y\n\n    z\n  lr: 1\n", f"a:\n  api_key: {HIDDEN}\n  lr: 1\n"),
        ("token=None max_token=4096 password=12345678", f"token=None max_token=4096 password={HIDDEN}"),
        ("xoxb-" + "1234567890", HIDDEN),  # the shortest, of which nothing but the form tells it
    ):
        assert redacted_text(text) == shown
    given = ["curl", "--api-key", "plainword", "-u", "me:hunter2", "https://x.org", BASE62, f"--thing={BASE62}"]
    hidden = ["curl", "--api-key", HIDDEN, "-u", f"me:{HIDDEN}", "https://x.org", HIDDEN, f"--thing={HIDDEN}"]
    assert redacted_arguments(given) == hidden
    given = ["train.py", BASE62, "--password", "it's mine", "--api-key=it's mine", "-x"]
    assert redacted_arguments(given) == ["train.py", HIDDEN, "--password", HIDDEN, f"--api-key={HIDDEN}", "-x"]
    assert redacted({"proxy": "me:p@ss@host:3128"}) == {"proxy": f"me:{HIDDEN}@host:3128"}


# ---- what is no secret


@pytest.mark.parametrize("words", ORDINARY_LISTS)
def test_ordinary_lists_stay(words: list[Any]) -> None:
    assert redacted({"words": words, "again": tuple(words)}) == {"words": words, "again": words}
    assert redacted_arguments(map(str, words)) == [str(word) for word in words]


def test_ordinary_settings_arguments_and_output_stay() -> None:
    for key in ORDINARY_NAMES:
        assert not secret_key(key)
        for value in (4096, "some words"):
            assert redacted({key: value}) == {key: value}
    for text in ORDINARY_TEXT:
        assert redacted_text(text) == text
        assert redacted({"lines": text.split("\n")}) == {"lines": text.split("\n")}
    for word in ORDINARY_ARGUMENTS:
        assert redacted_arguments([word]) == [word]


def test_what_is_called_a_secret_and_cannot_be_one_stays() -> None:
    for ordinary in (
        {"wandb": {"commit": HEX40}, "git": {"commit": HEX40}, "cache": {"key": HEX40}, "login": "me"},
        {"name": "commit", "value": HEX40},
        {"pass": 2, "forward_pass": "eager", "one_pass": True, "db_pass": None, "pw": 16},
        {"use_auth": True, "token": None, "max_token": 4096, "auth_timeout": 2.5, "token_": "5"},
    ):
        assert redacted(ordinary) == ordinary
    assert redacted({"password": 12345678}) == {"password": HIDDEN}


# ---- parts of secrets, and time


@pytest.mark.fault
def test_x10_half_a_private_key_is_hidden_too() -> None:
    body = "MIIEowIBAAKCAQEA0000MIIEowIBAAKCAQEA0000\n" * 3
    head, tail = "-----BEGIN " + "PRIVATE KEY-----\n", "-----END " + "PRIVATE KEY-----"
    assert "MIIE" not in redacted_text(f"x {head}{body}")
    assert "MIIE" not in redacted_text(f"{body}{tail} y")
    assert redacted_text(f"x {head}{body}{tail} y") == f"x {HIDDEN} y"
    assert redacted_arguments([f"{head}{body}", "y"]) == [HIDDEN, "y"]


@pytest.mark.fault
def test_x10_text_is_cut_after_it_is_redacted() -> None:
    """Half a secret has no form that tells it."""
    secret = BY_VALUE["github"]
    for before in range(9_970, 10_010):
        found = redacted_text("x " * (before // 2) + secret + " y" * 20_000)
        assert secret[4:12] not in found
    for length in range(470, 500):
        assert secret[4:12] not in "".join(redacted({"lines": ["x" * length + " " + secret]})["lines"])


BUSY = (
    "a", "-", "A1b2", "://", "eyJ", "key='", "key=\\", "--key ", "curl -u ", "-----END A\n", "login --x ", "name: value: ",
    "name=token" + " " * 39, "token: |\n", "proxy=a:@b@", "A.KEY ", "'--keys', 'a', ", "https://a@", "://a:b/", "password is ",
    "| a ", "a, b = '", "f('token', '", "<password>x", "ENV a ", "mysql -p", "auth=('", "token=a.b(", "密码:", "key: !!a ",
)  # fmt: skip
"""Each keeps some pattern busy to the end; a pattern that started over at each character would take minutes."""


def test_text_that_matches_nothing_is_read_in_linear_time() -> None:
    for piece in BUSY:
        redacted_text(piece * (40_000 // len(piece)))
    redacted([piece * 1_000 for piece in ("--password=a", "a:", "proxy=:", "A.KEY", "x@")] * 20)
    redacted_text("AAAAAAAA" * 10 + "\n" + ("A" * 64 + "\n") * 500 + "-----END CERTIFICATE-----")
