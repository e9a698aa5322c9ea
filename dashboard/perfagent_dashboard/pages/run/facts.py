"""What the server says of a run, as far as the top of its page shows it. One reading of all parts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from perfagent.wire import ENDED, FAMILIES
from perfagent.wire.loss_names import LOSS
from perfagent_dashboard.components.numbers import number
from perfagent_dashboard.server_api import Problem, ServerApi

__all__ = ["RunFacts", "read_facts", "run_path"]

_PARTS = ("verdict", "findings", "timing", "latest", "alerts", "names", "profiles")
_PATIENCE_S = 1.5
_NOT_YET: dict[str, Any] = {
    "rule": "", "severity": "info", "message": "", "title": "", "cause": "", "cost": "", "fix": "", "since": None,
    "since_step": None, "ranks": [], "evidence": {}, "gain_pct": None,
}  # fmt: skip
_JUDGED: dict[str, Any] = {"verdict": _NOT_YET, "findings": {"findings": []}}
"""What is shown until it has been judged."""
_CRASHED = frozenset({"failed", "killed", "oom"})


@dataclass(slots=True)
class RunFacts:
    """Each as its route answers it. run: the summary; may: the scopes of the viewer; ranks: how many processes report;
    marks: rule -> the series on whose charts its alerts stand, best first; has_stacks: where its threads stood was told."""

    run: Mapping[str, Any]
    verdict: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    timing: Mapping[str, Any]
    latest: Mapping[str, Mapping[str, Any]]
    alerts: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    loss_name: str
    profiles: Sequence[Mapping[str, Any]]
    may: Sequence[str]
    ranks: int
    marks: Mapping[str, Sequence[str]]
    has_stacks: bool

    @property
    def id(self) -> str:
        return str(self.run["run"])

    @property
    def has_ended(self) -> bool:
        return self.run["state"] in ENDED

    @property
    def is_unsettled(self) -> bool:
        """Whether the verdict is still to come: it takes long, or a rule has yet to say why the run failed."""
        return not self.verdict["rule"] or (self.verdict["rule"] == "healthy" and self.run["state"] in _CRASHED)

    @property
    def firing(self) -> list[Mapping[str, Any]]:
        return [alert for alert in self.alerts if alert["state"] == "firing"]

    def newest(self, name: str) -> float | None:
        sample = self.latest.get(name)
        return None if sample is None else number(sample["value"])

    def median(self, name: str) -> float | None:
        """Of step_time_s, a phase or a rate, over the window of `timing`."""
        known = {**self.timing["series"], **self.timing["rates"]}.get(name)
        return None if known is None else number(known["p50"])

    def has(self, *prefixes: str) -> bool:
        """Whether the name of a series begins so."""
        return any(name.startswith(prefixes) for name in self.names)

    @property
    def families(self) -> list[str]:
        return [family for family in FAMILIES if self.has(family)]

    def alert_of(self, rule: str) -> Mapping[str, Any] | None:
        """The open alert of a rule."""
        return next((alert for alert in self.firing if alert["rule"] == rule), None)


def run_path(run: str, *more: str) -> str:
    """Below /api/v1."""
    return "/".join(["/runs", quote(run, safe=""), *more])


async def read_facts(server: ServerApi, run: str) -> RunFacts:
    """Raises Problem; its status is 404 where there is no such run."""
    summary = await server.get(run_path(run))
    ident = summary["run"]
    parts, session, rules, stacks = await asyncio.gather(
        asyncio.gather(*(_read(server, ident, part) for part in _PARTS)),
        server.get("/session", run=ident),
        _marks(server),
        server.get(run_path(ident, "events"), kind="stacks", limit=1),
    )
    read = dict(zip(_PARTS, parts, strict=True))
    return RunFacts(
        run=summary, verdict=read["verdict"], findings=read["findings"]["findings"], timing=read["timing"],
        latest=read["latest"], alerts=read["alerts"]["alerts"], names=read["names"]["names"],
        loss_name=read["names"]["loss"] or LOSS,
        profiles=read["profiles"]["profiles"], may=session["may"], marks=rules,
        ranks=await _ranks(server, summary, read["latest"]), has_stacks=bool(stacks["events"]),
    )  # fmt: skip


async def _read(server: ServerApi, run: str, part: str) -> Any:
    """The verdict of a run with a million new points takes its time: the page does not wait for it, and asks again."""
    if part not in _JUDGED:
        return await server.get(run_path(run, part))
    try:
        return await asyncio.wait_for(server.get(run_path(run, part)), _PATIENCE_S)
    except TimeoutError:
        return _JUDGED[part]


async def _ranks(server: ServerApi, summary: Mapping[str, Any], latest: Mapping[str, Mapping[str, Any]]) -> int:
    """Those that the run was started with, or, where only its script reports, those that did."""
    started = int(summary["world_size"] or 1)
    several = next((name for name, sample in latest.items() if sample["rank"] == "all"), None)
    if started > 1 or several is None:
        return started
    matrix = await server.get(run_path(summary["run"], "ranks"), name=several, points=1)
    return max(1, len(matrix["ranks"]))


async def _marks(server: ServerApi) -> dict[str, list[str]]:
    """Without the answer an alert stands on the loss."""
    try:
        rules = await server.get("/rules")
    except Problem:
        return {}
    return {rule["rule"]: rule["charts"] for rule in rules["rules"]}
