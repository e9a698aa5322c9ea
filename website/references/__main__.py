"""Writes the pages. `scripts/references` starts it."""

from __future__ import annotations

from references import PAGES, REFERENCE

for name, page in PAGES.items():
    (REFERENCE / name).write_text(page(), "utf-8")
