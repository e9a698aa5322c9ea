"""Element ids that Python and the script assets share. An id is written here once and nowhere else in Python."""

from __future__ import annotations

__all__ = ["CONFIG", "LOCATION", "PAGE", "THEME"]

CONFIG = "perfagent-config"  # the JSON block in the HTML head that the assets read
LOCATION = "location"
PAGE = "page"
THEME = "theme"
