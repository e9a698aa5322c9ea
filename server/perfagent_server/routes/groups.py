"""Routes for grouped runs: the table of groups, the bands of a series, and settings beside results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from perfagent.errors import WireError
from perfagent.wire import STATES
from perfagent_server.routes.dependencies import Reader, ServicesDep
from perfagent_server.routes.problems import ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.runs.goal import Goal, goal_in
from perfagent_server.runs.run_filters import TableQuery
from perfagent_server.runs.run_groups import Band, Grouping
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services

__all__ = ["router"]

router = APIRouter()

_MOST_METRICS = 12
Many = Annotated[list[str] | None, Query(max_length=20)]
T = TypeVar("T")


def _filtered(
    services: ServicesDep,
    identity: Reader,
    project: str | None = None,
    state: Many = None,
    severity: Many = None,
    q: Annotated[str, Query(max_length=200)] = "",
    attention: bool = False,
    run: Annotated[list[str] | None, Query(max_length=100, description="only these, by id or name")] = None,
) -> TableQuery:
    """The runs that the filters of GET /runs let through."""
    wrong = [one for one in state or () if one not in STATES]
    if wrong:
        raise ApiError(422, "invalid", f"state is {wrong[0][:80]!r}; allowed are {', '.join(STATES)}", "state")

    only = None if run is None else [_found(services, identity, one) for one in run]

    def asked() -> TableQuery:
        query = TableQuery(
            parts=(), states=state or (), severities=severity or (), project=project, text=q, attention=attention,
            projects=identity.seen_projects, only=only,
        )  # fmt: skip
        return services.run_table.narrowed(query)

    return _valid(asked)


def _found(services: Services, identity: Identity, text: str) -> str:
    found = services.runs.find(text, identity.seen_projects)
    if found is None:
        raise ApiError(404, "not_found", f"there is no run {text[:128]!r}; GET /api/v1/runs lists them", "run")
    return found


Filtered = Annotated[TableQuery, Depends(_filtered)]
By = Annotated[str, Query(max_length=300, description="group, tag or config.NAME")]
GoalText = Annotated[
    str, Query(alias="goal", max_length=300, description="max:NAME or min:NAME; else the likeliest series")
]


def _valid(read: Callable[[], T], field: str | None = None) -> T:
    try:
        return read()
    except WireError as error:
        raise ApiError(422, "invalid", str(error), field) from None


def _by(text: str) -> Grouping | None:
    return _valid(lambda: Grouping.read(text), "by") if text else None


def _goal(text: str) -> Goal | None:
    return _valid(lambda: goal_in(text), "goal") if text else None


@dataclass
class Spread:
    """Of the newest values. spread: their sample standard deviation; n: how many runs have a finite one."""

    mean: float | None
    spread: float | None
    n: int


@dataclass
class BestRun:
    run: str
    name: str
    value: float


@dataclass
class Group:
    """value: null for runs without one. search: finds its runs in `q`. severity: the worst of its runs."""

    value: str | None
    search: str | None
    runs: int
    states: dict[str, int]
    severity: str
    metrics: dict[str, Spread]
    best: BestRun | None


@dataclass
class Groups:
    """choices: by what one can group. goals: what may be `goal`, likeliest first. names: series of the newest five runs. more:
    groups that were left out. best: of all."""

    by: str | None
    choices: list[str]
    goal: str | None
    goals: list[str]
    names: list[str]
    groups: list[Group]
    more: int
    runs: int
    best: BestRun | None


@router.get("/groups", responses={200: {"model": Groups}})
def groups(
    services: ServicesDep, asked: Filtered, by: By = "", goal: GoalText = "", metrics: Annotated[str, Query(max_length=4000)] = ""
) -> Response:  # fmt: skip
    """Groups of the newest 10,000 runs that match, one row for each; the 100 best by the mean of the goal. A run with
    several tags is in the group of each. `metrics`: names, separated by commas. Without `by`: what runs can be grouped
    by.
    """
    named = [name.strip() for name in metrics.split(",") if name.strip()]
    if len(named) > _MOST_METRICS:
        raise ApiError(422, "invalid", f"metrics may name {_MOST_METRICS} series, not {len(named)}", "metrics")
    return reply(services.run_groups.table(asked, _by(by), named, _goal(goal)))


@dataclass
class GroupBand:
    """of: how many runs are in the group; drawn: of how many of them, the newest, the band is made."""

    value: str | None
    of: int
    drawn: int
    band: Band


@dataclass
class Bands:
    name: str
    by: str
    groups: list[GroupBand]


@router.get("/groups/series", responses={200: {"model": Bands}})
def bands(
    services: ServicesDep, asked: Filtered, by: Annotated[str, Query(min_length=1, max_length=300)],
    name: Annotated[str, Query(min_length=1, max_length=256)], goal: GoalText = "",
    from_step: Annotated[int | None, Query(alias="from", ge=-(2**63), le=2**63 - 1)] = None,
    to_step: Annotated[int | None, Query(alias="to", ge=-(2**63), le=2**63 - 1)] = None,
    points: Annotated[int, Query(ge=2, le=2000)] = 500,
) -> Response:  # fmt: skip
    """A series of the first 20 groups of `GET /groups`: mean, lowest and highest value of their runs at each step."""
    if from_step is not None and to_step is not None and from_step > to_step:
        raise ApiError(422, "invalid", f"from is {from_step} and to is {to_step}; from must not be above to", "from")
    grouping = _by(by)
    assert grouping is not None  # it has a letter
    steps = from_step, to_step
    return reply(services.run_groups.bands(asked, grouping, _goal(goal), name, points=points, steps=steps))


@dataclass
class Column:
    """values: one a run."""

    name: str
    values: list[Any]


@dataclass
class GroupedRun:
    run: str
    name: str
    group: str | None


@dataclass
class RunSettings:
    """settings: those that differ, what means nothing (seeds) last. results: newest values, the goal first. total: how many
    runs match."""

    by: str | None
    choices: list[str]
    goal: str | None
    goals: list[str]
    runs: list[GroupedRun]
    settings: list[Column]
    results: list[Column]
    best: BestRun | None
    total: int


@router.get("/groups/runs", responses={200: {"model": RunSettings}})
def settings(services: ServicesDep, asked: Filtered, by: By = "", goal: GoalText = "") -> Response:
    """The settings in which the newest 300 runs that match differ, with their results."""
    return reply(services.run_groups.settings(asked, _by(by), _goal(goal)))
