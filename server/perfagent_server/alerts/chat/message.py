"""A message for people, before it is worded for one service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Message", "Severity"]

Severity = Literal["info", "warning", "critical", "resolved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """title: one line. text: any number of lines. Both are plain text, and may quote a training script: nothing in them
    becomes markup, a link or a mention. url: the page about it, the only link of the message."""

    title: str
    text: str
    severity: Severity
    url: str = ""
