"""The questions of real threads that the documents should answer: website/questions.json."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked import QUESTIONS, Question, first_pages

pytestmark = pytest.mark.real  # it builds the site


def shares(site: Path, questions: list[Question]) -> float:
    found = first_pages(site, questions)
    return sum(page == one["page"] for one, page in zip(questions, found, strict=True)) / len(questions)


def test_no_question_is_asked_twice() -> None:
    assert len({one["question"] for one in QUESTIONS}) == len({one["url"] for one in QUESTIONS}) == len(QUESTIONS)


def test_page_of_every_question_exists(site: Path) -> None:
    pages = {one["page"] for one in QUESTIONS} - {"none"}
    assert {page for page in pages if not (site / f"{page}.md").is_file()} == set()


@pytest.mark.parametrize(("group", "share"), [("on pages", 0.9), ("plain", 0.75), ("drawn", 0.4)])
def test_search_puts_the_right_page_first(site: Path, group: str, share: float) -> None:
    """The newest shares are in benchmarks/results/questions.json."""
    assert shares(site, [one for one in QUESTIONS if one.get("held_back", "on pages") == group]) >= share
