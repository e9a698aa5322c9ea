"""Markdown documents as tests read them: code, links and anchors, each with the line it stands in."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import subprocess
from collections.abc import Iterator

__all__ = ["ROOT", "Document", "Piece", "documents", "tracked_files"]

ROOT = pathlib.Path(__file__).parents[1]

_FENCE = re.compile(r"^[ \t]*```([\w-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n[ \t]*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|\b(?:href|src)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.MULTILINE)
_ANCHOR = re.compile(r"<a [^>]*?\b(?:id|name)=\"([^\"]+)\"")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A code block or code span. language: of a block, "" where it names none; None for a span."""

    text: str
    line: int
    language: str | None = None


@dataclasses.dataclass(frozen=True)
class Document:
    path: pathlib.Path
    text: str

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else self.path.name

    @property
    def twin(self) -> pathlib.Path | None:
        """Of a Chinese page, the English one."""
        if self.path.name == "README.zh-CN.md":
            return ROOT / "README.md"
        chinese = ROOT / "docs" / "zh"
        return ROOT / "docs" / self.path.relative_to(chinese) if self.path.is_relative_to(chinese) else None

    def line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    def code(self) -> Iterator[Piece]:
        for block in _FENCE.finditer(self.text):
            yield Piece(block[2], self.line(block.start()) + 1, block[1])
        for span in _SPAN.finditer(self.prose()):
            yield Piece(" ".join(span[2].split()), self.line(span.start()))

    def prose(self) -> str:
        """The text with every code block blanked out, so that each offset stays the same."""
        return _FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), self.text)

    def links(self) -> Iterator[tuple[str, int]]:
        """Targets of links and pictures, also those written in HTML, with their lines."""
        text = _SPAN.sub(lambda span: re.sub(r"[^\n]", " ", span[0]), self.prose())
        for found in _LINK.finditer(text):
            yield found[1] or found[2], self.line(found.start())

    def anchors(self) -> set[str]:
        """What `#...` may name: the headings as GitHub and GitLab spell them, and anchors written in HTML."""
        anchors: set[str] = set(_ANCHOR.findall(self.text))
        times: dict[str, int] = {}
        for heading in _HEADING.findall(self.prose()):
            shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            seen = times.get(name, 0)
            times[name] = seen + 1
            anchors.add(f"{name}-{seen}" if seen else name)
        return anchors


@functools.cache
def documents() -> list[Document]:
    """Every Markdown file of the repository."""
    return [Document(path, path.read_text()) for path in tracked_files() if path.suffix == ".md"]


@functools.cache
def tracked_files() -> list[pathlib.Path]:
    """Files that are in the repository, or would be after `git add`."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in sorted({*names.split("\0")}) if name and (ROOT / name).is_file()]
