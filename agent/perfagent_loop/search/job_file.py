"""What a file that describes a training may hold, read from its syntax tree before it is imported.

`perfagent tune FILE.py` imports the file to call its function `job`. A training script must not train then: the file
must bind that name, and its other top-level statements may only prepare."""

from __future__ import annotations

import ast
import builtins
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib.util import decode_source
from pathlib import Path

from perfagent.errors import ConfigError

__all__ = ["check_job_file"]

_PREPARING = ("torch", "numpy", "random", "logging", "warnings", "os", "sys")
"""Modules whose functions may be called as statements: seeds, logging, paths."""
_OF_PARSERS = ("add_argument", "add_argument_group", "parse_args", "parse_known_args", "set_defaults")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_HARMLESS = (ast.Import, ast.ImportFrom, *_DEFINITIONS, ast.Pass, ast.Global)


def check_job_file(file: Path, function: str) -> None:
    """Raises ConfigError where the file lacks that function, or importing it would do more than prepare."""
    try:
        tree = ast.parse(decode_source(file.read_bytes()), str(file))
    except (SyntaxError, UnicodeDecodeError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{file}{line}: this is no readable Python ({getattr(error, 'msg', error)})") from None
    names = _Names(tree)
    if function not in names.bound and not names.star:
        if not names.defined:
            raise ConfigError(f"{file} has no function; write `def {function}():` that returns a TuningJob")
        raise ConfigError(f"{file} has no function {function!r:.60}; it has {', '.join(sorted(names.defined))}")
    for statement in _that_do_more(tree.body, names):
        shown = textwrap.shorten(ast.unparse(statement).splitlines()[0], 60, placeholder="...")
        raise ConfigError(
            f"{file}, line {statement.lineno}: `{shown}` would run when the file is imported, before {function}() is "
            f'called; move it into {function}() or below `if __name__ == "__main__":`. The file was not run'
        )


class _Names:
    """Names at top level. imported: name -> module; own: defined or assigned here; star: `from x import *`."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, str] = {}
        self.defined: set[str] = set()
        self.own: set[str] = set()
        self.star = False
        for node in _at_top_level(tree.body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.imported[alias.asname or alias.name.partition(".")[0]] = alias.name
            elif isinstance(node, ast.ImportFrom):
                self.star = self.star or any(alias.name == "*" for alias in node.names)
                self.imported.update((alias.asname or alias.name, node.module or "") for alias in node.names)
            elif isinstance(node, _DEFINITIONS):
                self.defined.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.own |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        self.own |= self.defined

    @property
    def bound(self) -> set[str]:
        return self.own | set(self.imported)

    def module_of(self, function: ast.expr) -> str | None:
        """The module that a called function comes from, `builtins` among them; None where it is the file's own, or a
        method of what a library made: `Trainer().fit` trains, and `Path(__file__).resolve` does not."""
        made = False
        while isinstance(function, (ast.Attribute, ast.Call)):
            made = made or isinstance(function, ast.Call)
            function = function.func if isinstance(function, ast.Call) else function.value
        if isinstance(function, (ast.Constant, ast.JoinedStr)):
            return "builtins"
        if not isinstance(function, ast.Name) or function.id in self.own:
            return None
        module = self.imported.get(function.id) or ("builtins" if hasattr(builtins, function.id) else None)
        plain = module is not None and module.partition(".")[0] in (*_PREPARING, *sys.stdlib_module_names)
        return module if plain or not made else None


def _at_top_level(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import runs, those in branches among them."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If) and not _asks_for_main(statement.test):
            yield from _at_top_level([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            yield from _at_top_level([*statement.body, *handlers, *statement.orelse, *statement.finalbody])


def _that_do_more(statements: Iterable[ast.stmt], names: _Names) -> Iterator[ast.stmt]:
    for statement in _at_top_level(statements):
        if isinstance(statement, (*_HARMLESS, ast.Try)):
            continue
        if isinstance(statement, ast.If):
            plain = _asks_for_main(statement.test) or _only_prepares(statement.test, names)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            module = (names.module_of(statement.value.func) or "").partition(".")[0]
            plain = (module in _PREPARING or _is_a_parsers(statement.value)) and _only_prepares(statement.value, names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Assert, ast.Delete)):
            plain = _only_prepares(statement, names)
        else:  # a loop, a with block ...
            plain = False
        if not plain:
            yield statement


def _only_prepares(node: ast.AST, names: _Names) -> bool:
    """Whether nothing in it calls what the file itself made: its functions, models, trainers."""
    inside = [*ast.walk(node)]
    if any(isinstance(part, (ast.Await, ast.Yield, ast.YieldFrom)) for part in inside):
        return False
    calls = [part for part in inside if isinstance(part, ast.Call)]
    return all(names.module_of(call.func) is not None or _is_a_parsers(call) for call in calls)


def _is_a_parsers(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _OF_PARSERS


def _asks_for_main(test: ast.expr) -> bool:
    names = [part.id for part in ast.walk(test) if isinstance(part, ast.Name)]
    return isinstance(test, ast.Compare) and "__name__" in names
