"""Completes the package's metadata when it is built: the README as its description, and the project's links.

A package index shows the README without the repository around it, so a relative link or picture is dead there. With
`repository` in pyproject.toml set to the repository's web address, every one of them becomes absolute, and the package
gets its project links. The setting is empty until there is such an address; the README is then taken as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["DescriptionHook", "absolute"]

_CODE = r"^[ \t]*```.*?^[ \t]*```[ \t]*$|`[^`\n]+`"
_TARGET = r"(?P<before>\]\(\s*<?|^[ ]{0,3}\[[^\]]+\]:\s*<?|\b(?:href|src)=\")(?P<target>[^)\s>\"]+)"
_LINK = re.compile(f"(?P<code>{_CODE})|{_TARGET}", re.MULTILINE | re.DOTALL)
_PICTURES = (".png", ".svg", ".jpg", ".gif", ".webp")


class DescriptionHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository = str(self.config.get("repository", "")).rstrip("/")
        text = Path(self.root, "README.md").read_text("utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, repository) if repository else text,
        }
        metadata["urls"] = {}
        if repository:
            metadata["urls"] = {
                "Repository": repository,
                "Documentation": _address("docs/symptoms/index.md", repository),
                "Changelog": _address("CHANGELOG.md", repository),
            }


def absolute(text: str, repository: str) -> str:
    """Markdown in which every relative link and picture, also one written in HTML, leads into the repository. Code
    stays."""

    def replaced(found: re.Match[str]) -> str:
        if found["code"] is not None or re.match(r"[a-z][a-z0-9+.-]*:", found["target"]):
            return found[0]
        return found["before"] + _address(found["target"], repository)

    return _LINK.sub(replaced, text)


def _address(target: str, repository: str) -> str:
    """HEAD is the default branch. `blob` shows a file as a page and `raw` serves it, on every common host of git
    repositories."""
    if target.startswith("#"):
        return f"{repository}{target}"
    kind = "raw" if target.partition("#")[0].lower().endswith(_PICTURES) else "blob"
    return f"{repository}/{kind}/HEAD/{target.removeprefix('./')}"
