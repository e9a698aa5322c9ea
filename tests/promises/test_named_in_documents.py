"""What a document names exists: commands, options, settings, variables, Python names, files, links and anchors."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from command_line import commands, subcommands
from documents import ROOT, Document, Piece, documents, tracked_files

from perfagent.agent_config import AgentConfig
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.settings import Settings

pytestmark = pytest.mark.real  # it asks git for its files
DECISIONS = "docs/internals/decisions.md"
"""It names what was rejected, too: commands and options that do not exist are right there."""

FOREIGN_OPTIONS = {"--ipc", "--multirun", "--randomly-dont-reorganize", "--shm-size"}
"""Options of other people's programs that documents name without the program."""

USERS_FILES = {"FILE.py", "train.py", "script.py", "job.py", "section.md", "rules.toml"}
"""A reader's own files, and what a command writes where the reader says."""

OF_A_RUN = {"perfagent.config"}
"""Python names that exist while there is a run."""

Problems = Iterator[tuple[int, str]]

# ---- commands and options --------------------------------------------------------------------------------------------


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {*parser._option_string_actions}


@functools.cache
def script_options(path: pathlib.Path) -> frozenset[str] | None:
    """Options of a script of the repository, or None where they are another program's and anything may be said."""
    text = path.read_text()
    if "-m pytest" in text:
        return None
    options = {"--help", "-h", *re.findall(r"""add_argument\(\s*["'](-[\w-]+)""", text)}
    options |= {*re.findall(r"^\s*(--[\w-]+)\)", text, re.MULTILINE), *re.findall(r"= (--[\w-]+) \]", text)}
    for name in re.findall(r"\S+\.py\b", text) if path.suffix != ".py" else ():
        if (ROOT / name).is_file():
            options |= script_options(ROOT / name) or set()
    for name in re.findall(r"-m perfagent (\w+)", text):
        options |= options_of(commands()[name]) if name in commands() else set()
    return frozenset(options)


@functools.cache
def every_option() -> frozenset[str]:
    options = set(FOREIGN_OPTIONS)
    parsers = [*commands().values()]
    for parser in parsers:
        options |= options_of(parser)
        parsers += subcommands(parser).values()
    for script in (ROOT / "scripts").iterdir():
        options |= (script_options(script) or set()) if script.is_file() else set()
    return frozenset(options)


def unknown_commands(document: Document) -> Problems:
    for piece in document.code():
        if piece.language == "python":
            continue
        for number, text in enumerate(piece.text.replace("\\\n", "  ").splitlines()):
            for words in programs(text.split(" #")[0]):
                problems = [*wrong_words(words)]
                if piece.language in ("sh", "bash") and not problems:
                    problems = [*refused(words)]
                yield from ((piece.line + number, problem) for problem in problems)
        option = re.match(r"--[a-z][\w-]*", piece.text) if piece.language is None else None
        if option and option[0] not in every_option():
            yield piece.line, f"no command and no script has the option {option[0]!r}"


def programs(text: str) -> Iterator[list[str]]:
    """The words of each program of a command line, from its name on: perfagent, or a script or example of the
    repository."""
    for part in re.split(r"[|;&]+", text):
        try:
            words = shlex.split(part)
        except ValueError:  # prose or a formula, and no command line
            words = part.split()
        for at, word in enumerate(words):
            before = words[at - 1] if at else ""
            ours = (
                word == "perfagent" and before not in ("import", "from", "install") and words[at + 1 : at + 2] != ["as"]
            )
            if ours or re.fullmatch(r"(\./)?(scripts|examples|benchmarks|tests)/[\w/.]+", word):
                yield words[at:]
                break


def wrong_words(words: list[str]) -> Iterator[str]:
    named = [word.partition("=")[0].strip("[])") for word in words[1:] if word.strip("[").startswith("--")]
    if words[0] != "perfagent":
        path = ROOT / words[0]
        known = script_options(path) if path.is_file() and path.suffix != ".md" else None
        yield from (f"{words[0]} has no option {name!r}" for name in named if known is not None and name not in known)
    elif len(words) > 1 and re.fullmatch(r"[a-z][\w-]*", words[1]):
        parser = commands().get(words[1])
        if parser is None:
            yield f"there is no command {words[1]!r}"
            return
        if words[1] == "run":  # what stands behind the script is its own
            script = next((at for at, word in enumerate(words) if word.endswith(".py") or word in ("-m", "--")), None)
            named = [name for name in named if name in words[:script]]
        known = options_of(parser) | {"--"}
        below = subcommands(parser)
        if below and len(words) > 2 and re.fullmatch(r"[a-z][a-z-]+", words[2]):
            if words[2] not in below:
                yield f"{parser.prog} has no subcommand {words[2]!r}"
                return
            known |= options_of(below[words[2]])
        yield from (f"{parser.prog} has no option {name!r}" for name in named if name not in known)


def refused(words: list[str]) -> Iterator[str]:
    """What a command says of its arguments."""
    if words[0] == "perfagent" and words[1:2] and words[1] in commands():
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                commands()[words[1]].parse_args(words[2:])
        except SystemExit:
            yield said.getvalue().strip().rpartition("\n")[2]


# ---- settings and variables ------------------------------------------------------------------------------------------


@functools.cache
def variables() -> frozenset[str]:
    """PERFAGENT_... that the server's settings, or a literal in a source file or script, read."""
    known = {f"PERFAGENT_{item.name.upper()}" for item in dataclasses.fields(Settings)}
    for path in tracked_files():
        if (path.suffix == ".py" or path.parent.name == "scripts") and "tests" not in path.relative_to(ROOT).parts:
            known |= {*re.findall(r"[\"'{$](PERFAGENT_[A-Z_]+)\b", path.read_text())}
    return frozenset(known)


def unknown_variables(document: Document) -> Problems:
    for found in re.finditer(r"\bPERFAGENT_[A-Z_]*[A-Z]\b", document.text):
        if found[0] not in variables():
            yield document.line(found.start()), f"nothing reads {found[0]!r}"


def unknown_rows(document: Document) -> Problems:
    """The first cells of a table whose head says `setting` or `rule`."""
    settings = {item.name for kind in (AgentConfig, Settings) for item in dataclasses.fields(kind)}
    known = {"setting": settings, "rule": {rule.id for rule in all_rules()}}
    head = ""
    for number, line in enumerate(document.prose().splitlines(), 1):
        first = line.split("|")[1].strip() if line.startswith("|") else ""
        head = (head or first) if first else ""
        if head in known and (name := re.fullmatch(r"`(\w+)`", first)) and name[1] not in known[head]:
            yield number, f"there is no {head} {name[1]!r}"


# ---- Python, files and links -----------------------------------------------------------------------------------------

DOTTED = re.compile(r"(?<![\w./-])perfagent(?:_server|_client|_dashboard)?(?:\.[A-Za-z_]\w*)+")
TOP = "agent|server|client|dashboard|tests|docs|examples|scripts|benchmarks"
FROM_TOP = re.compile(rf"(?<![\w./~$-])(?:{TOP})/[\w./*-]*")
SOURCE = re.compile(r"(?<![\w./~$*<>-])(?:[\w-]+/)*[\w-]+\.(?:py|md|toml|yml)\b(?![\w/])")


def unknown_python(document: Document) -> Problems:
    for piece in document.code():
        for found in DOTTED.finditer(piece.text):
            if found[0] not in OF_A_RUN and not found[0].endswith(".py") and not resolves(found[0]):
                yield line_in(piece, found.start()), f"{found[0]!r} does not exist"


def line_in(piece: Piece, offset: int) -> int:
    return piece.line + piece.text.count("\n", 0, offset)


@functools.cache
def resolves(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            given = inspect.isclass(owner) and re.search(rf"\bself\.{part}\b", inspect.getsource(owner))
            if not hasattr(owner, part) and not given:
                return False
            owner = getattr(owner, part, None)
        return True
    return False


@functools.cache
def endings() -> frozenset[str]:
    """Every path of the repository, whole and from each of its folders on: documents name files from where they talk
    of."""
    names = set()
    for path in tracked_files():
        parts = path.relative_to(ROOT).parts
        for start, stop in itertools.product(range(len(parts)), range(1, len(parts) + 1)):
            names.add("/".join(parts[start:stop]))
    return frozenset(names)


def unknown_files(document: Document) -> Problems:
    seen: set[int] = set()
    for found in FROM_TOP.finditer(document.text):
        name = found[0].rstrip(".,:")
        group, _, rest = name.partition("/")
        if (group == "agent" and not rest.startswith("perfagent")) or rest == "":  # the metric `agent/dropped`
            continue
        seen.update(range(*found.span()))
        here = [ROOT, document.path.parent]
        exists = any(any(base.glob(name)) if "*" in name else (base / name).exists() for base in here)
        if not exists and name.rstrip("/") not in endings():
            yield document.line(found.start()), f"there is no file {name!r}"
    for found in SOURCE.finditer(document.text):
        if found.start() not in seen and found[0] not in endings() and found[0] not in USERS_FILES:
            yield document.line(found.start()), f"there is no file {found[0]!r}"


def dead_links(document: Document) -> Problems:
    for target, line in document.links():
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.path.parent / name).resolve() if name else document.path
        if name and not path.exists():
            yield line, f"{target!r} leads nowhere"
        elif anchor and anchor not in (document if not name else Document(path, path.read_text())).anchors():
            yield line, f"{target!r} leads nowhere: there is no such heading"


# ---- the promise -----------------------------------------------------------------------------------------------------

CHECKS = [unknown_commands, unknown_variables, unknown_rows, unknown_python, unknown_files, dead_links]
OF_TODAY = {unknown_commands, unknown_variables, unknown_python}


@pytest.mark.parametrize("check", CHECKS)
def test_what_a_document_names_exists(check: Callable[[Document], Problems]) -> None:
    wrong = """`perfagent frobnicate`, `perfagent up --paint`, `scripts/demo --paint`, PERFAGENT_PAINT, hooks/nowhere.py,
`perfagent.wire.nowhere`, [that](#no-heading)

| setting | meaning |
|---|---|
| `paint` | none |
"""
    assert [*check(Document(ROOT / "wrong.md", wrong))], "it finds nothing"
    looked = [each for each in documents() if each.name != DECISIONS or check not in OF_TODAY]
    assert [f"{each.name}:{line}: {problem}" for each in looked for line, problem in check(each)] == []
