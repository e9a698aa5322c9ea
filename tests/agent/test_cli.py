from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

import pytest
from command_line import command

from perfagent import cli
from perfagent.errors import ConfigError, ResourceError, ServerUnreachable


def test_help_lists_every_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    ended = command(capsys, "--help")
    assert ended.code == 0
    lines = ended.out.splitlines()
    names = {entry.name for entry in metadata.entry_points(group="perfagent.commands")}
    for name in names:
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert len(line.split()) > 2
    assert cli.SUMMARIES.keys() == names
    assert [line.rstrip(":") for line in lines if line.endswith(":") and not line.startswith(" ")] == list(cli.GROUPS)
    assert command(capsys).code == 2


LIGHT = """
import sys
from perfagent.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = ("torch", "httpx", "pydantic", "fastapi", "sqlalchemy", "dash", "pynvml", "rich", "argcomplete", "difflib")
print(*[name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.real
@pytest.mark.parametrize("words", [["--help"], ["sync", "--help"], ["run", "--help"]])
def test_help_and_light_commands_load_nothing_heavy(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, *words], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""


def test_package_that_some_commands_need_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "perfagent_client.watch.app", raising=False)
    ended = command(capsys, "watch")
    assert ended.code == 1
    assert ended.error == "perfagent watch: textual is missing; in the checkout: pip install '.[cli]'"


class Command:
    """An entry point whose command fails."""

    name, value = "up", "x:y"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def load(self) -> Callable[[argparse.ArgumentParser], None]:
        def fail(_: object) -> int:
            raise self.error

        return lambda parser: parser.set_defaults(run=fail)


MISSING = ModuleNotFoundError("No module named 'torch'", name="torch")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("port must be a number,\n\tnot 'x'"), 2, "port must be a number, not 'x'"),
        (ResourceError("the port\n\tis taken"), 1, "the port is taken"),
        (ServerUnreachable("nobody listens"), 1, "nobody listens"),
        (MISSING, 1, "this command needs torch, which is missing here; pip install torch"),
    ],
)
def test_error_of_ours_is_one_line_with_a_code_for_its_kind(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Command(error)])
    ended = command(capsys, "up")
    assert (ended.code, ended.error) == (code, f"perfagent up: {said}")
