"""Pieces of Markdown that the pages have in common."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

__all__ = ["filled", "linked", "meanings", "note", "table"]


def note(source: str) -> str:
    """Says to whoever opens the file where its text comes from."""
    return f"<!-- Written by scripts/references from {source}. Change it there. -->\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *(map(_cell, row) for row in rows))]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def linked(text: str) -> str:
    """A page of docs/ that the text names, as docs/server/users.md, is a link from docs/reference/."""
    paths = re.compile(r"\bdocs/(reference/)?([\w/-]*?)([\w-]+)\.md(#[\w-]+)?")
    return paths.sub(lambda at: f"[{at[3]}]({'' if at[1] else '../'}{at[2]}{at[3]}.md{at[4] or ''})", text)


def filled(page: str, part: str, text: str) -> str:
    """The page with another text between `<!-- part:begin -->` and its end. Raises ValueError if it has no such part."""
    before, begin, rest = page.partition(f"<!-- {part}:begin -->\n")
    _, end, after = rest.partition(f"<!-- {part}:end -->")
    if not end:
        raise ValueError(f"the page needs <!-- {part}:begin --> and <!-- {part}:end -->")
    return f"{before}{begin}{text}{end}{after}"


def meanings(kind: type) -> dict[str, str]:
    """The docstrings below the fields of a class and of its bases, each on one line; nothing of classes without a source."""
    found: dict[str, str] = {}
    for one in kind.__mro__:
        with contextlib.suppress(OSError, TypeError):
            (written,) = ast.parse(inspect.getsource(one)).body
            for field, below in pairwise(written.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    found.setdefault(field.target.id, " ".join(below.value.value.split()))
    return found
