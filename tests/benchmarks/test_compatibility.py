"""docs/evidence/compatibility.md says what its sections say, the matrix above all."""

from __future__ import annotations

from agent.frameworks.matrix import ROWS
from compatibility.page import PAGE, document


def test_the_page_is_as_it_is_written() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "scripts/compatibility writes it anew"


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({(row.family, row.name) for row in ROWS}) == len({row.id for row in ROWS}) == len(ROWS)
