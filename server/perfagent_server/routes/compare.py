"""Runs, or windows of runs, beside each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select
from starlette.responses import Response

from perfagent.errors import WireError
from perfagent_server.comparing.comparison import Asked, Comparison, compare
from perfagent_server.comparing.windows import window_of
from perfagent_server.routes.dependencies import Reader, ServicesDep
from perfagent_server.routes.problems import ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.rules.texts.spoken import spoken
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services
from perfagent_server.store.tables import alert

__all__ = ["router"]

router = APIRouter()

FEWEST, MOST = 2, 20


@router.get("/compare", responses={200: {"model": Comparison}})
def comparison(
    services: ServicesDep,
    identity: Reader,
    runs: Annotated[
        list[str], Query(min_length=FEWEST, max_length=MOST, description="RUN or RUN:FROM-TO, by id or name")
    ],
) -> Response:
    """Compares 2 to 20 runs, or windows of runs, with the first: `?runs=A&runs=B:100-500`."""
    return reply(compare(services.store, [_asked(services, identity, text) for text in runs]))


def _asked(services: Services, identity: Identity, text: str) -> Asked:
    try:
        window = window_of(text)
    except WireError as error:
        raise ApiError(422, "invalid", str(error), "runs") from None
    run = services.runs.find(window.run, identity.seen_projects)
    summary = services.runs.get(run) if run is not None else None
    if summary is None:
        raise ApiError(404, "not_found", f"there is no run {window.run[:128]!r}; GET /api/v1/runs lists them", "runs")
    if summary.step and (window.begin or 0) > summary.step:
        said = f"the window {text[:128]!r} begins after the run's last step, {summary.step:,}"
        raise ApiError(422, "invalid", said, "runs")
    if summary.step and window.end is not None:  # the name of the side says which steps were taken
        window = replace(window, end=min(window.end, summary.step))
    with services.database.read() as connection:
        query = select(alert.c.rule).where(alert.c.run == summary.run, alert.c.state != "pending")
        rules = frozenset(connection.execute(query).scalars())
    findings = [spoken(one) for one in services.engine.findings(summary.run)]
    return Asked(window, summary, services.verdict_of(summary.run), findings, rules)
