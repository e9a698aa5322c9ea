"""What holds a run back: the verdict, and everything that the rules find."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Depends
from starlette.responses import Response

from perfagent.wire import Finding
from perfagent_server.routes.dependencies import SeenRun, ServicesDep
from perfagent_server.routes.reply import reply
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.security.access import require
from perfagent_server.spending.finding_cost import with_money

__all__ = ["router"]

router = APIRouter()


@dataclass
class FindingList:
    findings: list[Finding]


@router.get("/runs/{run}/verdict", dependencies=[Depends(require("read"))], responses={200: {"model": Finding}})
def verdict(run: SeenRun, services: ServicesDep) -> Response:
    """The most important finding about a run, or `healthy`."""
    return reply(services.verdict_of(run))


@router.get("/runs/{run}/findings", dependencies=[Depends(require("read"))], responses={200: {"model": FindingList}})
def findings(run: SeenRun, services: ServicesDep) -> Response:
    """All findings about a run, the worst first. For a run that has ended, also what was true for most of its time."""
    rate = services.rate_of(run)
    return reply({"findings": [with_money(spoken(found), rate) for found in services.engine.findings(run)]})
