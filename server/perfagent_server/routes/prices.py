"""The prices of projects, from which runs and findings are told what they cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from sqlalchemy import Connection
from starlette.responses import Response

from perfagent_server.routes.dependencies import Administrator, ProjectAsked, Reader, ServicesDep, check_project
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.audit import listed, record
from perfagent_server.spending.prices import Price, drop_price, prices, set_price

__all__ = ["router"]

router = APIRouter()

Amount = Annotated[float | None, Field(ge=0, le=1e9, allow_inf_nan=False)]
Currency = Annotated[str, Field(max_length=100)]


@dataclass
class NewPrice:
    """In `currency`, such as EUR; what is left out is not priced. gpu_hour: of one GPU; cpu_core_hour: of one core;
    kwh: of energy, which is known of GPUs only. Replaces the project's price as a whole."""

    currency: Currency
    gpu_hour: Amount = None
    cpu_core_hour: Amount = None
    kwh: Amount = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class PriceShown:
    """project: empty for the price of all projects that have none of their own."""

    project: str
    gpu_hour: float | None
    cpu_core_hour: float | None
    kwh: float | None
    currency: str


@dataclass
class PriceList:
    prices: list[PriceShown]


@router.get("/prices", responses={200: {"model": PriceList}})
def list_prices(services: ServicesDep, identity: Reader) -> Response:
    """The prices of all projects that have one and that the caller may see."""
    with services.database.read() as connection:
        known = prices(connection)
    seen = [_shown(project, one) for project, one in known.items() if not project or identity.sees(project)]
    return reply({"prices": seen})


@router.put("/prices", responses={200: {"model": PriceShown}})
def change_price(
    asked: NewPrice, request: Request, services: ServicesDep, identity: Administrator, project: ProjectAsked = "",
) -> Response:  # fmt: skip
    """Sets the price of a project; without one, of all projects without their own. It counts for all hours of a run,
    also those before.
    """
    check_project(identity, "admin", project)
    if not 1 <= len(asked.currency) <= 16 or any(one.isspace() for one in asked.currency):
        said = f"currency is {asked.currency[:40]!r}; a word of up to 16 characters, such as EUR, is needed"
        raise ApiError(422, "invalid", said, "currency")
    if asked.gpu_hour is None and asked.cpu_core_hour is None and asked.kwh is None:
        raise ApiError(422, "invalid", "one of gpu_hour, cpu_core_hour and kwh is needed", "gpu_hour")
    one = Price(
        gpu_hour=asked.gpu_hour, cpu_core_hour=asked.cpu_core_hour, kwh=asked.kwh, currency=asked.currency
    )  # fmt: skip
    audit = record(request, identity, "price.change", project, listed(asdict(one)), project=project)

    def job(connection: Connection) -> None:
        set_price(connection, project, one)
        audit(connection)

    services.database.write(job, essential=True)
    return reply(_shown(project, one))


@router.delete("/prices", status_code=204, response_class=Response)
def remove_price(
    request: Request, services: ServicesDep, identity: Administrator, project: ProjectAsked = "",
) -> Response:  # fmt: skip
    """Removes the price of a project; without one, that of all projects."""
    check_project(identity, "admin", project)
    audit = record(request, identity, "price.remove", project, project=project)

    def job(connection: Connection) -> bool:
        audit(connection)
        return drop_price(connection, project)

    if not services.database.write(job, essential=True):
        raise ApiError(
            404, "not_found", f"{project[:80] or 'all projects'} has no price; GET /api/v1/prices lists them", "project"
        )
    return Response(status_code=204)


def _shown(project: str, one: Price) -> PriceShown:
    return PriceShown(
        project=project, gpu_hour=one.gpu_hour, cpu_core_hour=one.cpu_core_hour, kwh=one.kwh, currency=one.currency
    )  # fmt: skip
