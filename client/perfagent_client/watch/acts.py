"""What people do with an alert from the terminal: acknowledge, mute, and take the last of these back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from perfagent.wire import Alert
from perfagent_client.client import AsyncClient
from perfagent_client.models import parse
from perfagent_client.watch.fleet import worst

__all__ = ["Acts", "to_acknowledge", "to_mute"]

_MUTE_S = 3600.0


def to_acknowledge(firing: Iterable[Alert]) -> Alert | None:
    """The worst that nobody has taken."""
    return worst(alert for alert in firing if not alert.acknowledged)


def to_mute(firing: Iterable[Alert]) -> Alert | None:
    """The worst that is not muted; else the worst that is, whose mute ends."""
    alerts = list(firing)
    return worst(alert for alert in alerts if not alert.muted_until) or worst(alerts)


@dataclass
class Acts:
    client: AsyncClient
    undo_of: tuple[str, str] | None = None
    """The act that takes the last one back, and its alert."""

    async def acknowledge(self, alert: Alert, note: str) -> Alert:
        return await self._do(alert.id, "ack", "unack", {"note": note})

    async def mute(self, alert: Alert) -> Alert:
        """For an hour; ends the mute where it is muted."""
        if alert.muted_until:
            return await self._do(alert.id, "unmute", "mute", {})
        return await self._do(alert.id, "mute", "unmute", {"for_s": _MUTE_S})

    async def undo(self) -> Alert | None:
        """The alert as it stands then; None where there is nothing to take back."""
        if self.undo_of is None:
            return None
        act, alert = self.undo_of
        changed = await self._do(alert, act, None, {})
        self.undo_of = None
        return changed

    async def _do(self, alert: str, act: str, undo: str | None, body: dict[str, Any]) -> Alert:
        answer = await self.client.request("POST", f"/alerts/{quote(alert, safe='')}/{act}", body=body)
        if undo is not None:
            self.undo_of = (undo, alert)
        return parse(Alert, answer)
