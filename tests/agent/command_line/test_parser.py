"""Wrong use is one line in one style, whoever notices it; a command that was given nothing shows its help."""

from __future__ import annotations

import pytest
from command_line import command

from perfagent.command_line.parser import closest


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("up --port 99999", "perfagent up: --port is '99999'; allowed are 0 (any free one) to 65535; see `perfagent up --help`"),
        ("demo --port abc", "perfagent demo: --port is 'abc'; allowed are 0 (any free one) to 65535; see `perfagent demo"),
        ("demo --steps 0", "perfagent demo: --steps is '0', not a whole number above 0; see `perfagent demo --help`"),
        ("runs --limit abc", "perfagent runs: --limit is 'abc', not a whole number above 0; see `perfagent runs --help`"),
        ("up --auth none", "perfagent up: --auth is 'none'; allowed are auto, required; see `perfagent up --help`"),
        ("export x --format cvs", "perfagent export: --format is 'cvs'; allowed are jsonl, csv, parquet (did you mean csv?)"),
        ("runs --limit", "perfagent runs: --limit needs a value; see `perfagent runs --help`"),
        ("runs --json=yes", "perfagent runs: --json takes no value, and 'yes' was given; see `perfagent runs --help`"),
        ("runs --colour", "perfagent runs: there is no option --colour; see `perfagent runs --help`"),
        ("runs plain", "perfagent runs: 'plain' is one argument too many; see `perfagent runs --help`"),
        ("show --json", "perfagent show: RUN is missing; see `perfagent show --help`"),
        ("profile x --steps 101", "perfagent profile: --steps is '101', not a whole number from 1 to 100"),
        ("stacks x --wait nan", "perfagent stacks: --wait is 'nan', not a number above 0; see `perfagent stacks --help`"),
        ("wait x --until soon", "perfagent wait: --until is 'soon'; allowed are finding, step=N and end, separated by commas"),
        ("wait x --until step=-1", "perfagent wait: --until is 'step=-1'; allowed are finding, step=N and end"),
        ("wait x --timeout 0", "perfagent wait: --timeout is '0', not a number above 0; see `perfagent wait --help`"),
        ("keys create root", "perfagent keys create: scope is 'root'; allowed are ingest, read, operate, admin"),
        ("keys create read --expires-days 0", "--expires-days is '0', not a number above 0, at most 36500"),
        ("channels add pager x", "perfagent channels add: kind is 'pager'; allowed are webhook, slack, "),
        ("bench attention --batch abc", "perfagent bench attention: --batch is 'abc', not a whole number above 0"),
        ("bench nosuch", "perfagent bench: NAME is 'nosuch'; allowed are amp, checkpointing"),
        ("tune x.py --steps abc", "perfagent tune: --steps is 'abc'; a whole number is allowed; see `perfagent tune --help`"),
        ("shwo x", "perfagent: there is no command 'shwo'; did you mean `perfagent show`? `perfagent --help` lists them"),
        ("--verbose", "perfagent: there is no option --verbose; `perfagent --help` lists the commands, each has --help"),
        ("runs --server foo", "perfagent runs: the server's address is 'foo'; it must begin with http:// or https://"),
        ("channels list --server foo", "perfagent channels: the server's address 'foo' must begin with http:// or https://"),
        ("runs --data /no/such/folder", "perfagent runs: --data is '/no/such/folder', and there is no such folder"),
        ("channels list --data /no/such/folder", "perfagent channels: --data is '/no/such/folder', and there is no such"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_that_says_what_is_allowed_and_code_2(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = command(capsys, *words.split())
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.error


@pytest.mark.parametrize(
    "name", ["show", "export", "delete", "wait", "profile", "stacks", "channels", "keys", "db", "bench"]
)
def test_a_command_that_needs_something_and_was_given_nothing_shows_its_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = command(capsys, name)
    assert (ended.code, ended.out) == (2, "")
    assert f"usage: perfagent {name}" in ended.err and "-h, --help" in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith(f"perfagent {name}: ") and " missing; " in last, "what it needs"


def test_an_action_that_was_given_nothing_shows_its_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    ended = command(capsys, "channels", "add")
    assert ended.code == 2
    assert "usage: perfagent channels add" in ended.err and "where to send" in ended.err


def test_a_word_like_no_other_is_not_guessed() -> None:
    assert closest("exprot", ["export", "show"]) == "export"
    assert closest("frobnicate", ["export", "show"]) is None
