"""Series of a run: buckets with min, max and mean for a chart, and the matrix of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import StringConstraints
from starlette.responses import Response

from perfagent.wire import FAMILIES, RankMatrix, Series, Timing
from perfagent_server.routes.dependencies import Reader, SeenRun, ServicesDep
from perfagent_server.routes.problems import ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.runs.expressions import ExpressionError, calculated, parse
from perfagent_server.runs.layers import LayerMatrix, layer_matrix
from perfagent_server.runs.own_work import OWN_WORK, own_work
from perfagent_server.security.access import require
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services

__all__ = ["router"]

router = APIRouter()

_NAME = Query(min_length=1, max_length=256)
_MOST_SERIES = 100
MOST_RUNS = 200  # in one address, which has room for 64 kB


@dataclass
class SeveralSeries:
    series: dict[str, Series]


@router.get(
    "/runs/{run}/series", dependencies=[Depends(require("read"))], responses={200: {"model": Series | SeveralSeries}}
)
def series(
    run: SeenRun,
    services: ServicesDep,
    name: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=256)]] | None, Query(max_length=20)
    ] = None,
    expression: Annotated[str | None, Query(max_length=1000, description="such as train/loss - val/loss")] = None,
    rank: Annotated[str, Query(max_length=10, description="all, or the number of one rank")] = "all",
    from_step: Annotated[int | None, Query(alias="from", ge=-(2**63), le=2**63 - 1)] = None,
    to_step: Annotated[int | None, Query(alias="to", ge=-(2**63), le=2**63 - 1)] = None,
    points: Annotated[int, Query(ge=1, le=20_000)] = 1000,
) -> Response:
    """At most `points` buckets over the steps from..to, both inclusive; empty ones are left out. Several names
    (`?name=loss&name=lr`, at most 20) are answered together, by name.

    Or of an `expression` of up to 8 series, with numbers, brackets and `+ - * /` between spaces, a name with spaces in
    backticks: at the buckets of the one that has fewest, of their means, with a gap where it divides by zero."""
    if rank != "all" and not (rank.isascii() and rank.isdigit() and int(rank) < 2**31):
        raise ApiError(422, "invalid", f"rank is {rank!r}; allowed are all and 0 to {2**31 - 1}", "rank")
    _check_range(from_step, to_step)
    if bool(name) == (expression is not None):
        raise ApiError(422, "invalid", "give either `name` or `expression`", "name")
    read = partial(
        services.store.series, run, rank="all" if rank == "all" else int(rank), from_step=from_step, to_step=to_step,
        points=points,
    )  # fmt: skip
    if name:
        return reply(read(name[0]) if len(name) == 1 else {"series": {one: read(one) for one in name}})
    try:
        return reply(calculated(read, parse(expression or ""), partial(services.store.names, run)))
    except ExpressionError as error:
        raise ApiError(422, "invalid", f"expression: {error}", "expression") from error


@dataclass
class SeriesOfRuns:
    runs: dict[str, dict[str, Series]]


@router.get("/series", responses={200: {"model": SeriesOfRuns}})
def series_of_runs(
    services: ServicesDep,
    identity: Reader,
    run: Annotated[list[str], Query(min_length=1, max_length=20)],
    name: Annotated[list[str], Query(min_length=1, max_length=20)],
    from_step: Annotated[int | None, Query(alias="from", ge=-(2**63), le=2**63 - 1)] = None,
    to_step: Annotated[int | None, Query(alias="to", ge=-(2**63), le=2**63 - 1)] = None,
    points: Annotated[int, Query(ge=1, le=2000)] = 1000,
) -> Response:
    """The same series of several runs, by run and name: `?run=A&run=B&name=loss&name=lr`, at most 100 series together.
    Runs that do not exist are left out."""
    _check_range(from_step, to_step)
    if len(run) * len(name) > _MOST_SERIES:
        raise ApiError(
            422, "invalid", f"{len(run)} runs with {len(name)} names each: at most {_MOST_SERIES} series", "name"
        )
    read = partial(services.store.series, from_step=from_step, to_step=to_step, points=points)
    return reply({"runs": {one: {each: read(one, each) for each in name} for one in _seen(run, services, identity)}})


@router.get("/runs/{run}/ranks", dependencies=[Depends(require("read"))], responses={200: {"model": RankMatrix}})
def ranks(
    run: SeenRun,
    services: ServicesDep,
    name: Annotated[str, _NAME],
    from_step: Annotated[int | None, Query(alias="from", ge=-(2**63), le=2**63 - 1)] = None,
    to_step: Annotated[int | None, Query(alias="to", ge=-(2**63), le=2**63 - 1)] = None,
    points: Annotated[int, Query(ge=1, le=2000)] = 200,
) -> Response:
    """A matrix with one row for each rank and one column for each bucket of steps. The name `own_work_s` is the step
    time of a rank without its waiting for others.
    """
    _check_range(from_step, to_step)
    read = partial(services.store.ranks, run, from_step=from_step, to_step=to_step, points=points)
    return reply(own_work(read) if name == OWN_WORK else read(name))


@router.get("/runs/{run}/layers", dependencies=[Depends(require("read"))], responses={200: {"model": LayerMatrix}})
def layers(
    run: SeenRun,
    services: ServicesDep,
    family: Annotated[str, Query(max_length=64, description="such as grad_norm")],
    points: Annotated[int, Query(ge=1, le=2000)] = 200,
) -> Response:
    """A matrix with one row for each layer, in the order of the model, and one column for each bucket of steps."""
    if f"{family}/" not in FAMILIES:
        allowed = ", ".join(name.rstrip("/") for name in FAMILIES)
        raise ApiError(422, "invalid", f"family is {family!r}; allowed are {allowed}", "family")
    return reply(layer_matrix(services.store, run, family, points))


@router.get("/runs/{run}/timing", dependencies=[Depends(require("read"))], responses={200: {"model": Timing}})
def step_timing(
    run: SeenRun, services: ServicesDep, steps: Annotated[int | None, Query(ge=1, le=20_000)] = None
) -> Response:
    """Step time, its phases, throughput and shares, as the page and the command line show them: of the newest 100
    steps, or of the whole run if it has ended. `steps`: of the newest so many.
    """
    figures = services.figures
    return reply(figures.of(run) if steps is None else figures.newest(run, steps))


@dataclass
class Timings:
    timing: dict[str, Timing]


@router.get("/timing", responses={200: {"model": Timings}})
def timing_of_runs(
    services: ServicesDep, identity: Reader, run: Annotated[list[str], Query(min_length=1, max_length=MOST_RUNS)]
) -> Response:
    """The same of many runs at once, by run: `?run=A&run=B`, at most 200. Runs that do not exist are left out."""
    return reply({"timing": services.figures.of_runs(_seen(run, services, identity))})


def _seen(runs: list[str], services: Services, identity: Identity) -> list[str]:
    """Those that exist, and that the caller may see."""
    projects = services.runs.projects_of(runs)
    return [one for one in runs if one in projects and identity.sees(projects[one])]


def _check_range(from_step: int | None, to_step: int | None) -> None:
    if from_step is not None and to_step is not None and from_step > to_step:
        raise ApiError(422, "invalid", f"from is {from_step} and to is {to_step}; from must not be above to", "from")
