"""Questions that people asked in real threads, in website/questions.json, each with the page that answers it.

A page of the site ends with its questions, each a link to its thread, so that a search finds the page by the words in which
people ask. Questions that are held back stand on no page: they show how pages are found by words that nobody has put there. The
page "none" means that no page answers.

`scripts/questions` asks a plain BM25 (https://bm25s.github.io, with its own settings) for the first page for each question, among
the Markdown twins of all pages of the built site, and writes how often that is the right one.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

__all__ = ["QUESTIONS", "Question", "first_pages", "section"]

_ROOT = Path(__file__).resolve().parents[1]
_SITE = _ROOT / "build" / "site"
_RESULTS = _ROOT / "benchmarks" / "results" / "questions.json"
_HEADING = "## Also asked as"
"""The last of a page, where it has one."""


class Question(TypedDict):
    """page: its address on the site, without an ending, or "none". held_back: "drawn" at random from all that were found, vague
    ones too, or "plain": one of a hundred that state their problem as one does in a search."""

    question: str
    url: str
    page: str
    held_back: NotRequired[Literal["drawn", "plain"]]


QUESTIONS: list[Question] = json.loads((_ROOT / "website" / "questions.json").read_text("utf-8"))


def section(page: str, markdown: str) -> str:
    """What the end of a page says of those who asked; empty where nobody did."""
    asked = [one for one in QUESTIONS if one["page"] == page and not one.get("held_back")]
    if not asked:
        return ""
    links = "".join(f"- [{_as_text(one['question'])}]({one['url']})\n" for one in asked)
    heading = "" if _HEADING in markdown else f"{_HEADING}\n\n"
    summary = f"<summary>{len(asked)} threads, in the words of those who asked</summary>"
    return f'\n\n{heading}<details markdown="1">{summary}\n\n{links}\n</details>\n'


def first_pages(site: Path, questions: Sequence[Question]) -> list[str]:
    """For each question, the page that a plain BM25 puts first."""
    import bm25s  # the site is built without it

    twins = sorted(site.rglob("*.md"))
    index = bm25s.BM25()
    index.index(bm25s.tokenize([twin.read_text("utf-8") for twin in twins], show_progress=False), show_progress=False)
    words = bm25s.tokenize([one["question"] for one in questions], show_progress=False)
    found, _ = index.retrieve(words, k=1, show_progress=False)
    return [twins[place].relative_to(site).with_suffix("").as_posix() for [place] in found]


def _as_text(question: str) -> str:
    """Words of others as Markdown that shows them as they are."""
    escaped = re.sub(r"([\\`*{}\[\]#]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(question.split()))
    return escaped.replace("<", "&lt;")


def _measure() -> None:
    found = first_pages(_SITE, QUESTIONS)
    missed = [one | {"found": page} for one, page in zip(QUESTIONS, found, strict=True) if page != one["page"]]
    result: dict[str, object] = {"day": str(datetime.datetime.now(datetime.UTC).date())}
    for group in ("on pages", "plain", "drawn"):
        of = sum(one.get("held_back", "on pages") == group for one in QUESTIONS)
        misses = [one for one in missed if one.get("held_back", "on pages") == group]
        result[group] = {"questions": of, "right_page_first": of - len(misses), "missed": misses}
        print(f"{group}: the right page is first for {of - len(misses)} of {of} questions")  # noqa: T201
    _RESULTS.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    _measure()
