"""The questions of real threads that the documents should answer, in website/questions.json, each with its page."""

from __future__ import annotations

import json

from documents import ROOT

QUESTIONS = json.loads((ROOT / "website" / "questions.json").read_text("utf-8"))


def test_page_of_every_question_exists() -> None:
    pages = {one["page"] for one in QUESTIONS}
    assert {page for page in pages if not ((ROOT / "docs" / f"{page}.md").is_file() or page == "SECURITY")} == set()


def test_no_question_is_asked_twice() -> None:
    assert len({one["question"] for one in QUESTIONS}) == len({one["url"] for one in QUESTIONS}) == len(QUESTIONS)
