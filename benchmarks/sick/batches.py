"""The programs, in batches: a folder of programs/ with its expected.toml each, and the faults of the demo."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sick.expectations import Expectation, WrongExpectationError, expectation, read

from perfagent_server.rules.catalogue import all_rules
from perfagent_tools.demo.faults import FAULTS, Fault

__all__ = ["DEMO", "PROGRAMS", "Program", "all_programs", "chosen"]

PROGRAMS = Path(__file__).resolve().parent / "programs"
DEMO = "demo"
_DEMO_STEPS, _DEMO_LIMIT_S, _STARTS_S = 400, 240.0, 30.0
_REMARKS = {rule.id for rule in all_rules() if rule.severities == ("info",)}


@dataclass(frozen=True)
class Program:
    """words: what Python runs. run: the name that its run has. about: what it is, in a sentence or two."""

    batch: str
    name: str
    words: tuple[str, ...]
    run: str
    about: str
    expected: Expectation

    @property
    def key(self) -> str:
        return f"{self.batch}/{self.name}"


def all_programs(folder: Path = PROGRAMS) -> list[Program]:
    """Batch by batch. Raises WrongExpectationError."""
    batches = sorted(file.parent for file in folder.glob("*/expected.toml"))
    return [program for batch in batches for program in _of_folder(batch)] + [_of_demo(one) for one in FAULTS.values()]


def chosen(names: Iterable[str]) -> list[Program]:
    """Those of these names and batches, all without one. Raises ValueError for a name that is none of theirs."""
    programs, wanted = all_programs(), [*names]
    for name in wanted:
        if not any(name in (one.name, one.batch, one.key) for one in programs):
            batches = ", ".join(dict.fromkeys(one.batch for one in programs))
            raise ValueError(f"there is no program and no batch {name!r}; batches are {batches}")
    return [one for one in programs if not wanted or {one.name, one.batch, one.key} & {*wanted}]


def _of_folder(batch: Path) -> list[Program]:
    expected, files = read(batch / "expected.toml"), {file.stem: file for file in sorted(batch.glob("*.py"))}
    if apart := sorted(expected.keys() ^ files.keys()):
        raise WrongExpectationError(
            f"{batch}: a program has a table, and a table a program, but not {', '.join(apart)}"
        )
    programs = [
        Program(batch.name, name, (str(file),), name, expected[name].why or _first_line(file), expected[name])
        for name, file in files.items()
    ]
    _check_pairs(programs)
    return programs


def _first_line(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]


def _check_pairs(programs: Sequence[Program]) -> None:
    by_name = {one.name: one.expected for one in programs}
    for one in programs:
        twin = by_name.get(one.expected.pair)
        fits = twin is not None and (twin.pair, twin.healthy) == (one.name, not one.expected.healthy)
        if one.expected.pair and not fits:
            health = "sick" if one.expected.healthy else "healthy"
            raise WrongExpectationError(
                f"{one.key} is a pair with {one.expected.pair!r}, which must be a {health} program of the batch that names it too"
            )


def _of_demo(fault: Fault) -> Program:
    steps = max(_DEMO_STEPS, fault.min_steps)
    words = "-m", "perfagent_tools.demo.job", "--steps", str(steps), "--fault", fault.name
    run = "demo" if fault.name == "none" else f"demo {fault.name}"  # the job names it itself
    table: dict[str, object] = {"processes": fault.ranks, "limit_s": _DEMO_LIMIT_S}
    if fault.name == "none":
        table |= {"healthy": True, "state": [*fault.states]}
    else:
        table |= {"accept": dict.fromkeys(fault.expects, "")}
        table |= {"alert": "either" if _REMARKS & {*fault.expects} else "yes"}
        if fault.ends == "after its steps":
            table |= {"state": [*fault.states]}
        else:  # it would go on until somebody ends it
            table |= {"judge": "live", "limit_s": _STARTS_S + fault.verdict_s}
    return Program(DEMO, fault.name, words, run, fault.story, expectation(table, fault.name))
