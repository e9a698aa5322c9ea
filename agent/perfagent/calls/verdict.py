"""Asks the server for the verdict on a run, from inside the training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from perfagent.endpoint.addresses import is_on_this_machine

if TYPE_CHECKING:
    import httpx

    from perfagent.agent_config import AgentConfig
    from perfagent.wire import Finding, Series

__all__ = ["ask", "with_losses"]

TIMEOUT_S = 2.0
_POINTS = 120
"""Of a small curve."""


def ask(run: str, settings: AgentConfig, tell: Callable[[str, int, str], None]) -> Finding | None:
    """None when the server does not answer in time, the key may not read or there is no verdict yet: with a warning
    through `tell`. Raises nothing."""
    import httpx  # not with the training: few ask
    import msgspec

    from perfagent.wire import Finding

    try:
        with _client(settings) as client:
            answer = client.get(f"{settings.server}/api/v1/runs/{run}/verdict")
        if answer.status_code == 200:
            return msgspec.json.decode(answer.content, type=Finding)
        topic, why = f"verdict {answer.status_code}", _why(answer.status_code, run, settings)
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        why = f"server {settings.server} gave none within {TIMEOUT_S:g} s ({reason}); is it running?"
        topic = "verdict away"
    tell(topic, logging.WARNING, f"perfagent: no verdict here: {why}")
    return None


def with_losses(run: str, settings: AgentConfig) -> tuple[Finding | None, Series | None]:
    """The verdict, and the loss over the whole run; None for what the server does not say in time. Raises nothing."""
    import httpx
    import msgspec

    from perfagent.wire import Finding, Series

    verdict = losses = None
    with contextlib.suppress(httpx.HTTPError, msgspec.MsgspecError), _client(settings) as client:
        answer = client.get(f"{settings.server}/api/v1/runs/{run}/verdict")
        verdict = msgspec.json.decode(answer.content, type=Finding) if answer.is_success else None
        answer = client.get(f"{settings.server}/api/v1/runs/{run}/series?name=loss&points={_POINTS}")
        # not strict: "NaN" and "Infinity" are numbers
        losses = msgspec.json.decode(answer.content, type=Series, strict=False) if answer.is_success else None
    return verdict, losses


def _client(settings: AgentConfig) -> httpx.Client:
    import httpx

    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    return httpx.Client(timeout=TIMEOUT_S, trust_env=not is_on_this_machine(settings.server), headers=headers)


def _why(status: int, run: str, settings: AgentConfig) -> str:
    if status in (401, 403):
        given = "the key in PERFAGENT_API_KEY may not read" if settings.api_key else "reading needs a key"
        return (
            f"{given}. `perfagent keys create read` on the machine of server {settings.server} makes a key; with it in "
            f"PERFAGENT_API_KEY `perfagent show {run}` prints the verdict, also while this process sends with its own"
        )
    if status == 404:
        return f"server {settings.server} does not know this run yet; its first samples arrive within seconds"
    return f"server {settings.server} answered {status}; is that the address of a perfagent server?"
