"""Element ids that Python and the script assets share. An id is written here once and nowhere else in Python."""

from __future__ import annotations

__all__ = ["ACCOUNT", "KEYS", "LANGUAGE", "NOTES", "PAGE", "THEME"]

ACCOUNT = "account"  # who is logged in, and the way out
KEYS = "keys"
LANGUAGE = "language"
NOTES = "notes"  # short messages: what a button did, or why it could not
PAGE = "page"
THEME = "theme"
