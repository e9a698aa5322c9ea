"""The code of the documents as tests run it. A comment before a block of Python says what a reader has at that point:

    <!-- given: plain -->         the names of tests/given/plain.py; the page's next blocks continue there
    <!-- only compiled: REASON -->  the block is not run

Without either, a block continues the one before it on its page, and the first begins with `plain`. A block of `text` right
after a block of Python is what the latter prints; `...` stands for anything. A block of shell runs where it has such a comment;
tests/given/NAME.sh, if there is one, comes before it.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from documents import ROOT, Document, Piece

__all__ = ["GIVEN", "Script", "commands", "prints", "scripts"]

GIVEN = ROOT / "tests" / "given"
_COMMENT = re.compile(r"<!-- (given|only compiled): ([^>]+?) -->\s*\Z")


@dataclass
class Script:
    """Blocks of a page that run one after the other. given: the name of a file in tests/given/."""

    page: Document
    given: str
    blocks: list[Piece] = field(default_factory=list)
    printed: dict[int, str] = field(default_factory=dict)
    """What blocks print, by their places in `blocks`."""

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.blocks[0].line}"


def scripts(page: Document) -> Iterator[Script]:
    """What there is to run on a page."""
    script: Script | None = None
    lines = page.text.splitlines(keepends=True)
    ends_at = 0
    for piece in page.code():
        if piece.language == "python":
            comment = _COMMENT.search("".join(lines[: piece.line - 2]))
            if comment and comment[1] == "only compiled":
                continue
            if comment or script is None:
                if script:
                    yield script
                script = Script(page, comment[2] if comment else "plain")
            script.blocks.append(piece)
            ends_at = piece.line + piece.text.count("\n")
        elif piece.language == "text" and script and piece.line - ends_at <= 3:
            script.printed[len(script.blocks) - 1] = piece.text
    if script:
        yield script


def commands(page: Document) -> Iterator[Script]:
    """Blocks of shell that run, each with what it prints."""
    lines = page.text.splitlines(keepends=True)
    pieces = [piece for piece in page.code() if piece.language is not None]
    for place, piece in enumerate(pieces):
        comment = _COMMENT.search("".join(lines[: piece.line - 2]))
        if piece.language == "sh" and comment and comment[1] == "given":
            following = pieces[place + 1]
            yield Script(page, comment[2], [piece], {0: following.text} if following.language == "text" else {})


def prints(expected: str, found: str) -> bool:
    """Whether a program printed what a page says, where `...` is anything and white space is all alike."""
    return doctest.OutputChecker().check_output(expected, found, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
