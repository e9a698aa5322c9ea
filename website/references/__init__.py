"""Pages of docs/reference/ that are written from the code, some of them in part. `scripts/references` writes them, and a test
compares them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from references.command_line import command_line
from references.http import http
from references.metrics import metrics
from references.rules import rules
from references.settings import settings
from references.wire import wire

__all__ = ["PAGES", "REFERENCE"]

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "command-line.md": command_line, "http.md": http, "metrics.md": metrics, "rules.md": rules, "settings.md": settings,
    "wire.md": wire,
}  # fmt: skip
