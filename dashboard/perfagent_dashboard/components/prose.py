"""Texts as elements: `names in backticks` as code, numbered advice as a list, web addresses as links."""

from __future__ import annotations

import re

from dash import html
from dash.development.base_component import Component

__all__ = ["advice", "linked", "prose", "steps"]

_NUMBERED = re.compile(r"(?:^|\s)(?=\d{1,2}[.)]\s+[A-Z\u4e00-\u9fff])")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])|(?<=[。！？])\s*(?=[^\s）」』”])")
_ADDRESS = re.compile(r"(https?://[^\s<>\"'`，。；：！？）」]*[^\s<>\"'`，。；：！？）」.,;:!?)\]])")
_CODE = re.compile(
    r"`([^`]+)`"
    r"|(?<![\w`-])(--[a-z][\w-]+(?:=[\w.'\"]*\w)?|[A-Za-z_][\w.]{0,80}\([^()\s]{0,80}\)"
    r"|[A-Za-z_]\w{0,80}=[^\s,;)\u3000-\uffef]{0,80}[^\s,;).:\u3000-\uffef])"  # up to Chinese, which has no spaces
)
"""What stands in backticks; and flags, calls and settings: --nproc-per-node, clip_grad_norm_(), num_workers=4."""


def prose(text: str) -> list[Component | str]:
    parts: list[Component | str] = []
    end = 0
    for found in _CODE.finditer(text):
        parts += [text[end : found.start()], html.Code(found[1] or found[2])]
        end = found.end()
    return [part for part in (*parts, text[end:]) if part]


def linked(text: str) -> list[Component | str]:
    """What people wrote: web addresses in it are links."""
    parts = enumerate(_ADDRESS.split(text))
    return [one for at, part in parts for one in ([_link(part)] if at % 2 else prose(part))]


def _link(address: str) -> Component:
    return html.A(address, href=address, target="_blank", rel="noopener noreferrer")


def steps(fix: str) -> list[str]:
    """What to do, one thing after the other: lines, what is numbered ("1. Look ... 2. Halve ..."), else sentences."""
    lines = [line.strip() for line in fix.splitlines() if line.strip()]
    if len(lines) == 1:
        lines = _NUMBERED.split(lines[0]) if lines[0].startswith("1") else _SENTENCE.split(lines[0])
    return [re.sub(r"^\d{1,2}[.)]\s*", "", line).strip() for line in lines if line.strip()]


def advice(fix: str) -> Component | None:
    """As a list of numbered steps, where there are several."""
    found = steps(fix)
    if not found:
        return None
    return html.P(prose(found[0])) if len(found) == 1 else html.Ol([html.Li(prose(one)) for one in found])
