from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import perfagent
from perfagent import cli
from perfagent.errors import ConfigError, PerfagentError, ResourceError, ServerUnreachable


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "perfagent", *words], capture_output=True, text=True, timeout=60)


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"perfagent {perfagent.__version__}\n"


def test_help_lists_every_command_with_one_line() -> None:
    done = run("--help")
    assert done.returncode == 0
    for entry in metadata.entry_points(group="perfagent.commands"):
        (line,) = (line for line in done.stdout.splitlines() if line.split()[:1] == [entry.name])
        assert len(line.split()) > 2
        assert entry.name in cli.SUMMARIES
    headings = [
        line.rstrip(":") for line in done.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")
    ]
    assert headings == list(cli.GROUPS)


def test_every_command_that_has_a_summary_exists() -> None:
    assert cli.SUMMARIES.keys() <= {entry.name for entry in metadata.entry_points(group="perfagent.commands")}


LIGHT = """
import sys
from perfagent.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = ("torch", "httpx", "pydantic", "fastapi", "sqlalchemy", "dash", "pynvml")
print(*[name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["--help"], ["sync", "--help"], ["run", "--help"]])
def test_help_and_light_commands_load_nothing_heavy(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT, *words], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""


def test_no_command_and_an_unknown_one_are_wrong_use() -> None:
    assert run().returncode == 2
    done = run("frobnicate")
    assert done.returncode == 2
    assert "there is no command 'frobnicate'" in done.stderr
    assert run("sync", "--frobnicate").returncode == 2


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = metadata.EntryPoint("up", "perfagent_server.nothing_here:command", "perfagent.commands")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    with pytest.raises(SystemExit) as ended:
        cli.main(["up"])
    assert ended.value.code == 1
    assert "pip install '.[server]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "package", "extra"), [("report r -o -", "jinja2", "cli"), ("watch", "textual", "cli")]
)
def test_a_package_that_only_some_commands_need_is_named_with_its_extra(words: str, package: str, extra: str) -> None:
    without = f"import sys; sys.modules[{package!r}] = None; from perfagent.cli import main; main({words.split()})"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=60)
    command = words.split()[0]
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"perfagent {command}: {package} is missing; in the checkout: pip install '.[{extra}]'\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("port must be a number,\n\tnot 'x'"), 2), (ResourceError("port must be a number,\n\tnot 'x'"), 1),
        (ServerUnreachable("port must be a number, not 'x'"), 1),
    ],
)  # fmt: skip
def test_an_error_of_ours_is_one_line_and_its_exit_code_says_whose_it_is(
    error: PerfagentError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    entry = type(
        "Entry", (), {"name": "up", "value": "x:y", "load": lambda self: lambda parser: parser.set_defaults(run=fail)}
    )()
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    with pytest.raises(SystemExit) as ended:
        cli.main(["up"])
    assert ended.value.code == code
    assert capsys.readouterr().err == "perfagent up: port must be a number, not 'x'\n"


def test_a_command_that_trains_says_that_torch_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["torch"]

    def fail(_: object) -> int:
        raise ModuleNotFoundError(f"No module named {missing[0]!r}", name=missing[0])

    entry = type(
        "Entry", (), {"name": "up", "value": "x:y", "load": lambda self: lambda parser: parser.set_defaults(run=fail)}
    )()
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    with pytest.raises(SystemExit) as ended:
        cli.main(["up"])
    assert ended.value.code == 1
    assert (
        capsys.readouterr().err == "perfagent up: this command needs torch, which is missing here; pip install torch\n"
    )
    missing[0] = "of_the_users_script"
    with pytest.raises(ModuleNotFoundError):
        cli.main(["up"])
