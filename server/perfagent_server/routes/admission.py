"""What both routes that take samples ask before they store anything: may this sender send so much, from there, to here."""

from __future__ import annotations

from collections.abc import Iterable

from perfagent_server.ingest.sender_limits import Sender
from perfagent_server.routes.problems import ApiError
from perfagent_server.security.rights import Identity
from perfagent_server.services import Services

__all__ = ["check_key", "check_project", "check_rank", "sender_of_runs", "take"]


def check_project(identity: Identity, projects: Iterable[str]) -> None:
    """Raises ApiError where a key of one project sends to another."""
    if identity.project is None:
        return
    for project in projects:
        if project != identity.project:
            raise ApiError(
                403,
                "forbidden",
                f"this key may send to project {identity.project!r} only, not to {project[:80]!r}",
                "project",
            )


def check_rank(services: Services, rank: int, field: str = "rank") -> None:
    """Raises ApiError for a rank that no run here may have."""
    most = services.settings.max_ranks
    if rank >= most:
        raise ApiError(
            422,
            "invalid",
            f"rank is {rank}; a run may have the ranks 0 to {most - 1} here, or more with PERFAGENT_MAX_RANKS at the server",
            field,
        )


def check_key(services: Services, identity: Identity) -> None:
    """Raises RefusalError for a key that has sent too much, before its body is read and decoded."""
    if identity.has_key:
        services.sender_limits.check(_sender(services, identity, identity.who))


def take(services: Services, identity: Identity, run: str, *, samples: int, size_bytes: int) -> None:
    """Counts a request against the limits of its sender: its key, or its run where it has none. Raises RefusalError."""
    name, of_key = (identity.who, run) if identity.has_key else (f"run {run[:80]!r}", None)
    services.sender_limits.take(_sender(services, identity, name), samples=samples, size_bytes=size_bytes, run=of_key)


def sender_of_runs(services: Services, identity: Identity) -> Sender:
    """Whose limit new runs count against: all that come without a key share one."""
    return _sender(services, identity, identity.who)


def _sender(services: Services, identity: Identity, name: str) -> Sender:
    defaults = services.sender_limits.defaults
    return Sender(name, defaults.but(identity.limits) if identity.limits else defaults)
