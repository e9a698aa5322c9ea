"""Asks the server for the verdict on a run, from inside the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfagent.config import AgentConfig
    from perfagent.wire import Finding

__all__ = ["ask"]

TIMEOUT_S = 2.0


def ask(run: str, settings: AgentConfig, tell: Callable[[str, int, str], None]) -> Finding | None:
    """None when the server does not answer in time or knows no verdict, and, with a warning through `tell`, when the key may not
    read. Raises nothing."""
    import httpx  # not with the training: few ask
    import msgspec

    from perfagent.wire import Finding

    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    local = any(host in settings.server for host in ("//127.", "//localhost", "//[::1]"))
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=not local, headers=headers) as client:
            answer = client.get(f"{settings.server}/api/v1/runs/{run}/verdict")
        if answer.status_code in (401, 403):
            why = "the key in PERFAGENT_API_KEY may send, not read" if settings.api_key else "reading needs a key"
            tell("verdict", logging.WARNING, f"perfagent: no verdict here: {why}; see `perfagent show`")
        return msgspec.json.decode(answer.content, type=Finding) if answer.status_code == 200 else None
    except (httpx.HTTPError, msgspec.MsgspecError):
        return None
