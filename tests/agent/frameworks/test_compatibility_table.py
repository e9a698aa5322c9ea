"""docs/compatibility.md says what the matrix says."""

from __future__ import annotations

from pathlib import Path

from agent.frameworks.matrix import ROWS, document

DOCUMENT = Path(__file__).parents[3] / "docs" / "compatibility.md"


def test_the_document_is_the_matrix_that_is_tested() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "scripts/compatibility writes it anew"


def test_every_row_has_a_name_of_its_own() -> None:
    assert len({(row.family, row.name) for row in ROWS}) == len({row.id for row in ROWS}) == len(ROWS)
