"""The language in which the server is asked to speak."""

from __future__ import annotations

import os

__all__ = ["terminal_language"]


def terminal_language() -> str:
    """Of the terminal, as other programs see it: verdicts, alerts and remedies are said in it, where the server speaks it."""
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(name))), "")
    language = locale.partition(".")[0].replace("_", "-")
    is_one = language.isascii() and language.replace("-", "").isalnum() and language not in ("C", "POSIX")
    return language if is_one else "en"
