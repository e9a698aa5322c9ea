"""Asks the server for the verdict on a run, from inside the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from perfagent.endpoint.addresses import is_on_this_machine

if TYPE_CHECKING:
    from perfagent.agent_config import AgentConfig
    from perfagent.wire import Finding, Series

__all__ = ["ask", "with_losses"]

TIMEOUT_S = 2.0
_POINTS = 120
"""Points of the small curve."""


def ask(run: str, settings: AgentConfig, tell: Callable[[str, int, str], None]) -> Finding | None:
    """None when the server does not answer in time, the key may not read or there is no verdict yet: with a warning
    through `tell`. Raises nothing."""
    verdict, _, why = _asked(run, settings)
    if why:
        tell(f"verdict {why:.40}", logging.WARNING, f"perfagent: no verdict here: server {settings.server} {why}")
    return verdict


def with_losses(run: str, settings: AgentConfig) -> tuple[Finding | None, Series | None]:
    """The verdict, and the loss over the whole run; None for what the server does not say in time. Raises nothing."""
    return _asked(run, settings, f"series?name=loss&points={_POINTS}")[:2]


def _asked(run: str, settings: AgentConfig, losses: str = "") -> tuple[Finding | None, Series | None, str]:
    """Verdict, series, and why there is no verdict. losses: the address of the series."""
    import httpx  # not with the training: few ask
    import msgspec

    from perfagent.wire import Finding, Series

    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    trusts = not is_on_this_machine(settings.server)
    at = f"{settings.server}/api/v1/runs/{run}/"
    verdict = series = None
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=trusts, headers=headers) as client:
            answer = client.get(f"{at}verdict")
            if not answer.is_success:
                return (
                    None,
                    None,
                    _WHY.get(answer.status_code, f"answered {answer.status_code}; is it a perfagent server?"),
                )
            verdict = msgspec.json.decode(answer.content, type=Finding)
            found = client.get(f"{at}{losses}") if losses else None
            if found is not None and found.is_success:  # not strict: "NaN" and "Infinity" are numbers
                series = msgspec.json.decode(found.content, type=Series, strict=False)
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return verdict, None, f"gave none within {TIMEOUT_S:g} s ({reason}); is it running?"
    return verdict, series, ""


_NO_KEY = "needs a key that may read in PERFAGENT_API_KEY: `perfagent keys create read` on its machine makes one"
_WHY = {401: _NO_KEY, 403: _NO_KEY, 404: "does not know this run yet; its first samples arrive within seconds"}
