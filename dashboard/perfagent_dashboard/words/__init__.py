"""Every sentence that the pages say, in the language of whoever asks. The scripts hold no text of their own: the document
gives them the sentences that they name.

Titles and units of metrics come from the catalog in perfagent.wire, in Chinese from chinese_metrics.toml. What findings and
alerts say comes from the server, in the language of whoever asks; their evidence, and what an agent added, in English.
"""

from __future__ import annotations

import tomllib
from functools import cache
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from dash.backends._fastapi import get_current_request

from perfagent.wire import STATE_SHAPES, metric
from perfagent_dashboard.words.sentences import LANGUAGES, keys, sentence, templates

__all__ = ["LANGUAGES", "STATE_SHAPES", "keys", "language", "say", "sentence", "templates", "title_of"]

COOKIE = "perfagent-language"


def say(key: str, **figures: object) -> str:
    """A sentence in the language of whoever asked for the page that is being made. A number stays one: it is grouped, and
    chooses the plural."""
    return sentence(language(), key, **figures)


def title_of(name: str, of: str | None = None) -> str:
    """A metric as a heading. of: in this language; None: in that of whoever asked."""
    title = metric(name).title
    return _chinese_titles().get(name, title) if (of or language()) == "zh" else title


@cache
def _chinese_titles() -> dict[str, str]:
    return tomllib.loads(Path(__file__).with_name("chinese_metrics.toml").read_text("utf-8"))


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
