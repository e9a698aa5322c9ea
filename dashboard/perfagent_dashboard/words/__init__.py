"""Every sentence that the pages say, in the language of whoever asks. The scripts get the same table and hold no text of
their own; `{name}` in a text is filled in by `say()`, here and in assets/lib/config.js.

Titles and units of metrics come from the catalog in perfagent.wire, in Chinese from chinese_metrics.py. What findings and
alerts say comes from the server, in the language of whoever asks; their evidence, and what an agent added, in English.
"""

from __future__ import annotations

import re
from http.cookies import CookieError, SimpleCookie

from dash.backends._fastapi import get_current_request

from perfagent.wire import metric
from perfagent_dashboard.words.chinese import CHINESE
from perfagent_dashboard.words.chinese_metrics import CHINESE_METRICS
from perfagent_dashboard.words.english import ENGLISH

__all__ = ["ENGLISH", "LANGUAGES", "STATE_SHAPES", "language", "say", "title_of"]

LANGUAGES = {"en": ENGLISH, "zh": CHINESE}
COOKIE = "perfagent-language"
_PLURAL = re.compile(r"\{(\w+)\|([^|}]*)\|([^|}]*)\}")
"""{count|run|runs}: a word for one, and for any other number. Not in texts that the scripts say."""

# A shape for every state, so that a badge can be read without its color.
STATE_SHAPES = {
    "starting": "◌",
    "running": "●",
    "lost": "?",
    "finished": "✓",
    "failed": "✕",
    "oom": "✕",
    "killed": "■",
    "preempted": "‖",
}


def say(key: str, **values: object) -> str:
    """A sentence in the language of whoever asked for the page that is being made."""
    text = LANGUAGES[language()].get(key) or ENGLISH[key]
    text = _PLURAL.sub(lambda found: found[2 if str(values[found[1]]) == "1" else 3], text)
    return text.format(**values) if values else text


def title_of(name: str, of: str | None = None) -> str:
    """A metric as a heading. of: in this language; None: in that of whoever asked."""
    title = metric(name).title
    return CHINESE_METRICS.get(name, title) if (of or language()) == "zh" else title


def language() -> str:
    """What the viewer chose, else the first language of the browser that there is; English outside of a request."""
    try:
        headers = get_current_request().headers
    except RuntimeError:
        return "en"
    try:
        chosen = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:  # of another program on the same host
        chosen = None
    if chosen is not None and chosen.value in LANGUAGES:
        return chosen.value
    wanted = (one.split(";")[0].split("-")[0].strip().lower() for one in headers.get("accept-language", "").split(","))
    return next((one for one in wanted if one in LANGUAGES), "en")
