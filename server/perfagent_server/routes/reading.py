"""In which language a request is answered."""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie

from fastapi import Request

from perfagent_server.rules.texts.reader import language_of, reader

__all__ = ["read_in_own_language"]

_COOKIE = "perfagent-language"  # what a viewer of the pages chose


async def read_in_own_language(request: Request) -> None:
    """A dependency of every route: what a viewer of the pages chose, else what the request accepts. (async: a plain function
    runs in a thread, and what it sets is lost.)"""
    try:
        chosen = SimpleCookie(request.headers.get("cookie", "")).get(_COOKIE)
    except CookieError:  # of another program on the same host
        chosen = None
    reader.set(language_of(request.headers.get("accept-language", ""), "" if chosen is None else chosen.value))
