"""What we promise about the Chinese pages: each says what its English twin says, and programs print the same beside both."""

from __future__ import annotations

import io
import re
import tokenize

import pytest
from documents import Document, documents

pytestmark = pytest.mark.real  # it asks git for its files
CHINESE = [page for page in documents() if page.twin]
NUMBER = re.compile(r"(?<![\w.,])\d[\d,.]*\d|(?<![\w.,])\d")


def without_comments(language: str, text: str) -> list[str]:
    """Lines of code that are more than a comment."""
    lines = text.splitlines()
    if language == "python":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0] - 1] = token.line[: token.start[1]]
    else:
        lines = [re.sub(r"(^|\s)#.*", "", line) for line in lines]
    return [line.rstrip() for line in lines if line.strip()]


def code_blocks(page: Document) -> list[tuple[str, list[str]]]:
    """Language and lines of each block; of output, which may be Chinese, the language alone."""
    blocks = [piece for piece in page.code() if piece.language is not None]
    return [
        (piece.language or "", [] if piece.language == "text" else without_comments(piece.language or "", piece.text))
        for piece in blocks
    ]


def headings(page: Document) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", page.prose(), re.MULTILINE)]


def numbers(page: Document) -> set[str]:
    """Numbers of the text, without those in addresses of links."""
    return set(NUMBER.findall(re.sub(r"\]\([^)]*\)", "]", page.prose())))


@pytest.mark.parametrize("page", CHINESE, ids=[page.name for page in CHINESE])
def test_chinese_page_has_the_structure_of_its_twin(page: Document) -> None:
    [twin] = [other for other in documents() if other.path == page.twin]
    assert headings(page) == headings(twin)
    assert code_blocks(page) == code_blocks(twin)
    assert numbers(page) >= numbers(twin)


def test_no_symptom_is_without_its_chinese_page() -> None:
    symptoms = {page.path for page in documents() if page.name.startswith("docs/symptoms/")}
    assert symptoms - {page.twin for page in CHINESE} == set()
