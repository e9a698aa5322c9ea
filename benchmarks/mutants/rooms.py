"""The rooms, the commit that their mutants are drawn from, and what a mutant is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["DRAWN_FROM", "MUTANTS", "ROOMS", "TESTS", "Mutant", "Placed", "hashed", "in_room"]

DRAWN_FROM = "6ee35d09186b35589cc5eb51f27c08b90e31349e"  # the last commit before the tests were made fewer
SEED = 20261129
MUTANTS = 25  # a room

ROOMS = {
    "rules": "server/perfagent_server/rules",
    "delivery": "agent/perfagent/delivery",
    "store": "server/perfagent_server/store",
    "engine": "server/perfagent_server/engine",
}
_ANOTHER_ENGINE = "server/perfagent_server/store/clickhouse/"  # its tests want a server of ClickHouse

# Where the tests of the rooms are. Others touch them, too, but are about something else.
TESTS = ("tests/server", "tests/agent/delivery", "tests/faults")


@dataclass(frozen=True)
class Mutant:
    """A change of one line. repeat: which of the lines of the same text in this function; nth: which of the places on
    this line that the operator may change."""

    room: str
    file: str
    function: str
    text: str
    repeat: int
    operator: str
    nth: int

    @property
    def line_id(self) -> str:
        return hashed(self.file, self.function, self.text, self.repeat)

    @property
    def id(self) -> str:
        return hashed(self.line_id, self.operator, self.nth)[:12]


@dataclass(frozen=True)
class Placed:
    """Where a mutant is in the source of a commit. source: the whole file with the change."""

    line: int
    source: str


def in_room(room: str, file: str) -> bool:
    return file.startswith(f"{ROOMS[room]}/") and file.endswith(".py") and not file.startswith(_ANOTHER_ENGINE)


def hashed(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, (SEED, *parts))).encode()).hexdigest()
