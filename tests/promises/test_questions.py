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


def test_search_finds_the_page_of_nine_in_ten_questions(site: Path) -> None:
    assert shares(site, [one for one in QUESTIONS if not one.get("held_back")]) >= 0.9


def test_search_finds_the_page_of_questions_that_stand_on_none(site: Path) -> None:
    """Measured by scripts/questions."""
    assert shares(site, [one for one in QUESTIONS if one.get("held_back")]) >= 0.5
