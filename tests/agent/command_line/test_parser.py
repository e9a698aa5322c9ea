"""Wrong use is one line in one style, whoever notices it; a command that was given nothing shows its help."""

from __future__ import annotations

import pytest
from command_line import command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("up --port 99999", "perfagent up: --port is '99999'; allowed are 0 (any free one) to 65535; see `perfagent up --help`"),
        ("demo --steps 0", "perfagent demo: --steps is '0', not a whole number above 0; see `perfagent demo --help`"),
        ("demo --fault nonsense", "perfagent demo: there is no fault 'nonsense'; there are: none, nan, spike, "),
        ("up --auth none", "perfagent up: --auth is 'none'; allowed are auto, required; see `perfagent up --help`"),
        ("export x --format cvs", "perfagent export: --format is 'cvs'; allowed are jsonl, csv, parquet (did you mean csv?)"),
        ("runs --limit", "perfagent runs: --limit needs a value; see `perfagent runs --help`"),
        ("runs plain", "perfagent runs: 'plain' is one argument too many; see `perfagent runs --help`"),
        ("delete --json", "perfagent delete: RUN is missing; see `perfagent delete --help`"),
        ("stacks x --wait nan", "perfagent stacks: --wait is 'nan', not a number above 0; see `perfagent stacks --help`"),
        ("wait x --until soon", "perfagent wait: --until is 'soon'; allowed are finding, step=N and end, separated by commas"),
        ("bench nosuch", "perfagent bench: NAME is 'nosuch'; allowed are amp, checkpointing"),
        ("shwo x", "perfagent: there is no command 'shwo'; did you mean `perfagent show`? `perfagent --help` lists them"),
        ("--verbose", "perfagent: there is no option --verbose; `perfagent --help` lists the commands, each has --help"),
        ("runs --server foo", "perfagent runs: the server's address is 'foo'; it must begin with http:// or https://"),
        ("runs --data /no/such/folder", "perfagent runs: --data is '/no/such/folder', and there is no such folder"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_that_says_what_is_allowed(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = command(capsys, *words.split())
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.error


@pytest.mark.parametrize("name", ["delete", "stop", "channels", "keys", "db", "bench", "channels add"])
def test_a_command_that_was_given_nothing_shows_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended = command(capsys, *name.split())
    assert (ended.code, ended.out) == (2, "")
    assert f"usage: perfagent {name}" in ended.err and "-h, --help" in ended.err
    last = ended.err.splitlines()[-1]
    assert last.startswith(f"perfagent {name}: ") and " missing; " in last, "what it needs"
