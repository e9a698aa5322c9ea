"""The prices of projects: what an hour of a GPU, an hour of a CPU core and a kWh cost there. None is assumed."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, select

from perfagent_server.store.statements import put
from perfagent_server.store.stored_json import stored_number
from perfagent_server.store.tables import price

__all__ = ["ALL_PROJECTS", "Price", "drop_price", "price_of", "prices", "set_price"]

ALL_PROJECTS = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """In `currency`; None: not priced. kwh: of the energy of the GPUs."""

    gpu_hour: float | None = None
    cpu_core_hour: float | None = None
    kwh: float | None = None
    currency: str

    def of(self, gpu_hours: float | None, cpu_core_hours: float | None, gpu_energy_kwh: float | None) -> float | None:
        """The money for all of these together; None where nothing of it is known and has a price."""
        pairs = (self.gpu_hour, gpu_hours), (self.cpu_core_hour, cpu_core_hours), (self.kwh, gpu_energy_kwh)
        parts = [one * amount for one, amount in pairs if one is not None and amount is not None]
        return sum(parts) if parts else None


def price_of(connection: Connection, project: str) -> Price | None:
    """That of the project, else that of all projects."""
    known = prices(connection, (project, ALL_PROJECTS))
    return known.get(project) or known.get(ALL_PROJECTS)


def prices(connection: Connection, projects: tuple[str, ...] | None = None) -> dict[str, Price]:
    """By project; projects: only those."""
    query = select(price).order_by(price.c.project)
    if projects is not None:
        query = query.where(price.c.project.in_(projects))
    return {
        row["project"]: Price(
            **{name: stored_number(row[name]) for name in ("gpu_hour", "cpu_core_hour", "kwh")}, currency=str(row["currency"])
        )
        for row in connection.execute(query).mappings()
    }  # fmt: skip


def set_price(connection: Connection, project: str, one: Price) -> None:
    values = {
        "gpu_hour": one.gpu_hour, "cpu_core_hour": one.cpu_core_hour, "kwh": one.kwh, "currency": one.currency
    }  # fmt: skip
    put(connection, price, {"project": project, **values})


def drop_price(connection: Connection, project: str) -> bool:
    """Whether there was one."""
    return bool(connection.execute(delete(price).where(price.c.project == project)).rowcount)
