"""What we promise about the site of the documents: it builds without a warning or a network, and programs can read it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from references import PAGES, REFERENCE

pytestmark = pytest.mark.real


def test_every_page_has_a_twin_in_markdown(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) > 30
    assert [str(path) for path in pages if not path.with_suffix(".md").is_file()] == []


def test_no_row_of_a_table_falls_out_of_it(site: Path) -> None:
    assert [page.name for page in site.rglob("*.html") if "<p>|" in page.read_text("utf-8")] == []


def test_twin_of_a_python_page_has_an_argument_per_line(site: Path) -> None:
    twin = (site / "reference" / "python.md").read_text("utf-8")
    assert "\n* **`start_step`** (`int | None`, default: `None`): The number" in twin
    assert "Permanent link" not in twin


def test_list_for_programs_names_pages_that_exist(site: Path) -> None:
    links = re.findall(r"\]\(https://docs\.example/([^)]+)\)", (site / "llms.txt").read_text("utf-8"))
    assert "reference/rules.md" in links
    assert [link for link in links if not (site / link).is_file()] == []


def test_readers_browser_asks_nobody_but_the_site(site: Path) -> None:
    asked = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(https?://[^\s\">]+)")
    found = {address for page in site.rglob("*.html") for address in asked.findall(page.read_text("utf-8"))}
    assert {address for address in found if not address.startswith("https://docs.example/")} == set()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_page_from_the_code_is_what_the_code_says(name: str) -> None:
    assert (REFERENCE / name).read_text("utf-8") == PAGES[name](), "run scripts/references"
