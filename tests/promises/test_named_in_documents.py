"""What a document names exists: commands, options, settings, variables, Python names, files, links and anchors."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import pathlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from documents import ROOT, Document, Piece, documents, tracked_files

import perfagent
from perfagent.agent_config import AgentConfig
from perfagent_client import AsyncClient, Client
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.settings import Settings

DECISIONS = ROOT / "docs" / "decisions.md"
"""It names what was rejected, too: commands and options that do not exist are right there."""

FOREIGN_OPTIONS = {"--multirun"}
"""Options of other people's programs that documents name without the program."""

USERS_FILES = {"train.py", "script.py", "job.py", "section.md", "rules.toml"}
"""A reader's own files, and what a command writes where the reader says."""

OF_A_RUN = {"perfagent.config"}
"""Python names that exist while there is a run."""

Problems = Iterator[tuple[int, str]]


# ---- the promise -----------------------------------------------------------------------------------------------------


def named_in(check: Callable[[Document], Problems], *, but: pathlib.Path | None = None) -> list[str]:
    return [
        f"{each.name}:{line}: {problem}" for each in documents() if each.path != but for line, problem in check(each)
    ]


def test_every_command_and_option_that_a_document_names_exists() -> None:
    assert named_in(lambda document: unknown_commands(document), but=DECISIONS) == []


def test_every_variable_that_a_document_names_is_read_by_something() -> None:
    assert named_in(lambda document: unknown_variables(document), but=DECISIONS) == []


def test_every_setting_and_rule_that_a_table_names_exists() -> None:
    assert named_in(lambda document: unknown_rows(document)) == []


def test_every_python_name_and_argument_that_a_document_names_exists() -> None:
    assert named_in(lambda document: unknown_python(document), but=DECISIONS) == []


def test_every_file_and_folder_that_a_document_names_exists() -> None:
    assert named_in(lambda document: unknown_files(document)) == []


def test_every_link_and_anchor_leads_somewhere() -> None:
    assert named_in(lambda document: dead_links(document)) == []


BROKEN = """
# A heading

See [this](#a-heading), [that](#no-heading), [there](nowhere.md) and ![it](docs/none.png).

`perfagent frobnicate`, `perfagent up --colour`, `perfagent channels paint`, `--no-such-option`; `scripts/demo --colour`.

```sh
PERFAGENT_COLOUR=blue perfagent show RUN --loud | head --lines 3     # not --this
perfagent run --loud train.py --lr 3e-4
```

```python
run = perfagent.attach(model, colour="red")
run.paint()
perfagent.frobnicate(model)
```

`attach(model, depth=2)`, `perfagent.training.nowhere.thing`, `perfagent.wire.Frame`;
hooks/nowhere.py, `agent/perfagent/nowhere/`.

| setting | meaning |
|---|---|
| `colour` | none |
"""


@pytest.mark.parametrize(
    ("check", "problems"),
    [
        ("unknown_commands", ["frobnicate", "--colour", "paint", "--no-such-option", "--colour", "--loud", "--loud"]),
        ("unknown_variables", ["PERFAGENT_COLOUR"]),
        ("unknown_rows", ["colour"]),
        (
            "unknown_python",
            ["colour", "run.paint", "perfagent.frobnicate", "depth", "perfagent.training.nowhere.thing"],
        ),
        ("unknown_files", ["hooks/nowhere.py", "agent/perfagent/nowhere/", "nowhere.md", "docs/none.png"]),
        ("dead_links", ["#no-heading", "nowhere.md", "docs/none.png"]),
    ],
)
def test_what_does_not_exist_is_found(check: str, problems: list[str]) -> None:
    found = [problem for _, problem in globals()[check](Document(ROOT / "broken.md", BROKEN))]
    missed = [name for name in problems if not any(f"{name!r}" in problem for problem in found)]
    assert missed == []
    assert len(found) == len(problems), found


# ---- commands and options --------------------------------------------------------------------------------------------


@functools.cache
def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, made by the functions that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parsers = {}
    for name, target in project["entry-points"]["perfagent.commands"].items():
        module, _, function = target.partition(":")
        parsers[name] = argparse.ArgumentParser(prog=f"perfagent {name}", allow_abbrev=False)
        getattr(importlib.import_module(module), function)(parsers[name])
    return parsers


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(found, {})


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return dict(parser._option_string_actions)


@functools.cache
def script_options(path: pathlib.Path) -> frozenset[str] | None:
    """Options of a script of the repository, or None where they are another program's and anything may be said."""
    text = path.read_text()
    if path.suffix == ".py" or text.startswith("#!/usr/bin/env python"):
        return frozenset(["--help", "-h", *python_options(text)])
    if "-m pytest" in text:
        return None
    options = {"--help", *re.findall(r"^\s*(--[\w-]+)\)", text, re.MULTILINE), *re.findall(r"= (--[\w-]+) \]", text)}
    for name in re.findall(r"\S+\.py\b", text):
        if (ROOT / name).is_file():
            options |= script_options(ROOT / name) or set()
    for name in re.findall(r"-m perfagent (\w+)", text):
        options |= {*options_of(commands()[name])}
    return frozenset(options)


def python_options(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("-"):
                    yield str(argument.value)


@functools.cache
def every_option() -> frozenset[str]:
    options = set(FOREIGN_OPTIONS)
    parsers = [*commands().values()]
    for parser in parsers:
        options |= {*options_of(parser)}
        parsers += subcommands(parser).values()
    for script in (ROOT / "scripts").iterdir():
        options |= (script_options(script) or set()) if script.is_file() else set()
    return frozenset(options)


def unknown_commands(document: Document) -> Problems:
    for piece in document.code():
        if piece.language == "python":
            continue
        for line, text in command_lines(piece):
            for words in programs(text):
                yield from ((line, problem) for problem in wrong_words(words))
        option = re.match(r"--[a-z][\w-]*", piece.text) if piece.language is None else None
        if option and option[0] not in every_option():
            yield piece.line, f"no command and no script has the option {option[0]!r}"


def command_lines(piece: Piece) -> Iterator[tuple[int, str]]:
    joined = piece.text.replace("\\\n", "  ")
    for number, text in enumerate(joined.splitlines()):
        yield piece.line + number, text.split(" #")[0]


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
            if word == "perfagent" and before not in ("import", "from", "install") and words[at + 1 : at + 2] != ["as"]:
                yield words[at:]
                break
            if re.fullmatch(r"(\./)?(scripts|examples|benchmarks|tests)/[\w/.]+", word):
                yield words[at:]
                break


def wrong_words(words: list[str]) -> Iterator[str]:
    if words[0] != "perfagent":
        path = ROOT / words[0]
        known = script_options(path) if path.is_file() and path.suffix != ".md" else None
        if known is not None:
            wanted = (word.partition("=")[0] for word in words[1:] if word.startswith("--"))
            yield from (f"{words[0]} has no option {word!r}" for word in wanted if word not in known)
        return
    if len(words) == 1 or words[1] in ("--help", "--version", "-V") or not re.fullmatch(r"-?-?[a-z][\w-]*", words[1]):
        return
    parser = commands().get(words[1])
    if parser is None:
        yield f"there is no command {words[1]!r}"
        return
    yield from wrong_options(parser, words[2:], stops=words[1] == "run")


def wrong_options(parser: argparse.ArgumentParser, words: list[str], *, stops: bool) -> Iterator[str]:
    """stops: what stands behind the first word is the script's own."""
    skip = 0
    for at, word in enumerate(words):
        if skip:
            skip -= 1
            continue
        if word.startswith("-"):
            name = word.partition("=")[0].strip("[]")
            action = options_of(parser).get(name)
            if action is None and name not in ("-", "--"):
                yield f"{parser.prog} has no option {name!r}"
            elif action is not None and action.nargs is None and "=" not in word:
                skip = 1
            if stops and name == "-m":
                return
        elif subcommands(parser):
            if re.fullmatch(r"[a-z][a-z-]+", word):
                below = subcommands(parser).get(word)
                if below is None:
                    yield f"{parser.prog} has no subcommand {word!r}"
                else:
                    yield from wrong_options(below, words[at + 1 :], stops=False)
            return
        elif stops:
            return


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
        if not line.startswith("|"):
            head = ""
            continue
        first = line.split("|")[1].strip()
        head = head or first
        if head in known and (name := re.fullmatch(r"`(\w+)`", first)) and name[1] not in known[head]:
            yield number, f"there is no {head} {name[1]!r}"


# ---- Python ----------------------------------------------------------------------------------------------------------


@functools.cache
def objects() -> dict[str, tuple[type, ...]]:
    """The classes of the variables that examples in documents use by these names."""
    return {
        "run": (perfagent.Run,),
        "loop": (perfagent.Loop,),
        "checkpoint": (perfagent.Checkpoint,),
        "policy": (perfagent.NanPolicy,),
        "split": (perfagent.SplitOnOom,),
        "client": (Client, AsyncClient),
    }


def unknown_python(document: Document) -> Problems:
    for piece in document.code():
        if piece.language in (None, "python") and not piece.text.endswith(".py"):
            yield from unknown_calls(piece)
        for found in re.finditer(
            r"(?<![\w./-])perfagent(?:_server|_client|_dashboard)?(?:\.[A-Za-z_]\w*)+", piece.text
        ):
            if found[0] not in OF_A_RUN and not resolves(found[0]):
                yield piece.line + piece.text.count("\n", 0, found.start()), f"{found[0]!r} does not exist"


def unknown_calls(piece: Piece) -> Problems:
    """Arguments that a function does not take, and methods that a run, a loop, a client or a checkpoint does not
    have."""
    try:
        tree = ast.parse(piece.text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kinds = objects().get(node.value.id, ())
            if kinds and not any(has(kind, node.attr) for kind in kinds):
                yield piece.line + node.lineno - 1, f"{ast.unparse(node)!r} does not exist"
        if isinstance(node, ast.Call) and (function := called(node.func)) is not None:
            takes = inspect.signature(function).parameters.values()
            if not any(each.kind is each.VAR_KEYWORD for each in takes):
                names = {each.name for each in takes}
                wrong = (keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg not in names)
                yield from (
                    (piece.line + node.lineno - 1, f"{ast.unparse(node.func)}() takes no {name!r}") for name in wrong
                )


def called(function: ast.expr) -> Any:
    """What a call in a document calls, where it is ours: `attach(...)`, `perfagent.attach(...)` or `run.log(...)`."""
    if isinstance(function, ast.Name):
        return public(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        if function.value.id == "perfagent":
            return public(function.attr)
        methods = (getattr(kind, function.attr, None) for kind in objects().get(function.value.id, ()))
        return next((method for method in methods if callable(method)), None)
    return None


def public(name: str) -> Any:
    if name in perfagent.__all__:
        return getattr(perfagent, name)
    return {"Client": Client, "AsyncClient": AsyncClient}.get(name)


@functools.cache
def has(kind: type, name: str) -> bool:
    """Whether objects of a class have an attribute: of the class, or given to each by one of its methods."""
    return hasattr(kind, name) or re.search(rf"\bself\.{name}\b", inspect.getsource(kind)) is not None


@functools.cache
def resolves(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(owner, part) and not (inspect.isclass(owner) and has(owner, part)):
                return False
            owner = getattr(owner, part, None)
        return True
    return False


# ---- files and links -------------------------------------------------------------------------------------------------

TOP = "agent|server|client|dashboard|tests|docs|examples|scripts|benchmarks"
FROM_TOP = re.compile(rf"(?<![\w./~$-])(?:{TOP})/[\w./*-]*")
SOURCE = re.compile(r"(?<![\w./~$*<>-])(?:[\w-]+/)*[\w-]+\.(?:py|md|toml|yml)\b(?![\w/])")


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
    metrics = {"agent"}  # the group of metrics `agent/dropped`
    seen: set[int] = set()
    for found in FROM_TOP.finditer(document.text):
        name = found[0].rstrip(".,:")
        group, _, rest = name.partition("/")
        if (group in metrics and not rest.startswith("perfagent")) or rest == "":
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
        elif anchor:
            there = document if not name else Document(path, path.read_text())
            if anchor not in there.anchors():
                yield line, f"{target!r} leads nowhere: there is no such heading"
