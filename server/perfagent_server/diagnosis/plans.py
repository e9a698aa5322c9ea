"""The rules by which a server judges the runs of a project, asked of it through its API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Protocol
from urllib.parse import quote

from perfagent.errors import PerfagentError
from perfagent_server.rules.catalogue import rules_for
from perfagent_server.rules.own_alert import OwnAlert, own_alert
from perfagent_server.rules.plan import Plan

__all__ = ["Api", "ServerPlans"]

_FORM = {one.name for one in fields(OwnAlert)}


class Api(Protocol):
    def request(self, method: str, path: str) -> Any: ...


class ServerPlans:
    """say: called once where the server does not let its rules be read, or has some that this version does not know."""

    def __init__(self, api: Api, say: Callable[[str], None]) -> None:
        self._api, self._say = api, say
        self._known: dict[str, tuple[dict[str, dict[str, Any]], list[OwnAlert]]] = {}

    def of(self, project: str, tags: Iterable[str] = ()) -> Plan:
        if project not in self._known:
            self._known[project] = self._asked(project)
        settings, own = self._known[project]
        has = set(tags)
        return Plan([*rules_for(settings), *(one for one in own if has.issuperset(one.tags))])

    def _asked(self, project: str) -> tuple[dict[str, dict[str, Any]], list[OwnAlert]]:
        asked = f"?project={quote(project, safe='')}"
        try:
            rules = self._api.request("GET", f"/rules{asked}")["rules"]
            own = self._api.request("GET", f"/rules/alerts{asked}")["alerts"]
            settings = {one["rule"]: {"enabled": one["enabled"], **one["thresholds"]} for one in rules}
            rules_for(settings)  # may be those of another version
            return settings, [own_alert({name: value for name, value in one.items() if name in _FORM}) for one in own]
        except (PerfagentError, KeyError) as error:
            self._say(
                f"the rules of the server cannot be used here ({error}); runs are judged by the rules as they come"
            )
            return {}, []
