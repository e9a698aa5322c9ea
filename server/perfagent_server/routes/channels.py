"""Channels, their test, and the deliveries: an administrator's business, because they make the server send."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict
from sqlalchemy import Connection, select
from starlette.responses import Response

from perfagent.errors import ConfigError
from perfagent_server.alerts import channels
from perfagent_server.alerts.tables import as_dict
from perfagent_server.routes.dependencies import AdministratorOfAll, Reader, ServicesDep
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import require_everywhere
from perfagent_server.security.audit import record
from perfagent_server.security.outbound import TOTAL_S, AddressNotAllowed
from perfagent_server.services import Services
from perfagent_server.store.changes import note_change
from perfagent_server.store.tables import delivery
from perfagent_server.store.tables import run as runs

__all__ = ["router"]

router = APIRouter()

_DELIVERY_STATES = ("waiting", "delivered", "failed")


@dataclass
class ChannelRequest:
    """kind: webhook, slack, discord, teams, feishu, dingtalk, wecom, email or heartbeat. secret, of a webhook: whsec_ and
    the base64 of 24 to 64 bytes; left out, one is made. min_severity: info, warning or critical. projects, tags: only runs
    of one of these projects, with one of these tags. group_s: the shortest time between two messages about a run, apart
    from critical alerts (600 for chats and mail). repeat_s: an alert that still fires, and that nobody acknowledged, is sent
    again. summaries: also what became of each run that ended. every_s: of a digest; of a heartbeat, which needs it.
    language: of its messages, en or zh."""

    url: str
    name: str = ""
    kind: str = "webhook"
    secret: str | None = None
    min_severity: str = "warning"
    projects: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    group_s: float | None = None
    repeat_s: float = 0.0
    summaries: bool = False
    every_s: float = 0.0
    language: str = "en"

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class ChannelChange:
    """What is left out stays. enabled: false switches the channel off."""

    url: str | None = None
    name: str | None = None
    min_severity: str | None = None
    projects: list[str] | None = None
    tags: list[str] | None = None
    group_s: float | None = None
    repeat_s: float | None = None
    summaries: bool | None = None
    every_s: float | None = None
    language: str | None = None
    enabled: bool | None = None

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class ChannelMade:
    """secret: of a webhook, shown this once; empty for other kinds."""

    id: str
    secret: str


@dataclass
class ChannelShown:
    """url: without what is secret in it. old_secret_until: until then both secrets of a rotation sign."""

    id: str
    name: str
    kind: str
    url: str
    min_severity: str
    projects: list[str]
    tags: list[str]
    group_s: float
    repeat_s: float
    summaries: bool
    every_s: float
    language: str
    enabled: bool
    disabled_reason: str
    created: str
    failing_since: str | None
    old_secret_until: str | None


@dataclass
class ChannelList:
    channels: list[ChannelShown]


@dataclass
class DeliveryShown:
    """id: the webhook-id; state: waiting, delivered or failed; status: of the last answer; due: of the next try."""

    id: str
    channel: str
    alert: str | None
    event: str
    state: str
    tries: int
    created: str
    due: str | None
    delivered: str | None
    status: int | None
    error: str


@dataclass
class DeliveryList:
    deliveries: list[DeliveryShown]


@router.post("/channels", status_code=201, responses={201: {"model": ChannelMade}})
def create_channel(
    new: ChannelRequest, request: Request, services: ServicesDep, identity: AdministratorOfAll
) -> Response:
    """Makes a channel. `secret` is shown only in this answer."""
    given = {name: getattr(new, name) for name in _names(ChannelRequest)}
    wanted = _checked(services, **{**given, "name": new.name or channels.shown_url(new.kind, new.url)[:80] or new.kind})
    audit = record(request, identity, "channel.create", wanted.name, wanted.kind)

    def job(connection: Connection) -> tuple[str, str]:
        made = channels.create(connection, wanted, time.time())
        audit(connection)
        return made

    identifier, secret = services.database.write(job)
    return reply({"id": identifier, "secret": secret}, 201)


@router.patch("/channels/{channel_id}", responses={200: {"model": ChannelShown}})
def change_channel(
    channel_id: str, change: ChannelChange, request: Request, services: ServicesDep, identity: AdministratorOfAll
) -> Response:
    """Changes a channel; its secret stays."""
    with services.database.read() as connection:
        known = channels.read(connection, channel_id)
    if known is None:
        raise _unknown(channel_id)
    told = {name: value for name in _names(ChannelChange) if (value := getattr(change, name)) is not None}
    enabled = told.pop("enabled", None)
    before = {name: getattr(known, name) for name in _names(channels.NewChannel)}
    wanted = _checked(services, **{**before, **told})
    audit = record(request, identity, "channel.change", channel_id, ", ".join(sorted(told)))

    def job(connection: Connection) -> None:
        channels.change(connection, channel_id, wanted, enabled=enabled)
        audit(connection)

    services.database.write(job)
    with services.database.read() as connection:
        return reply(next(one for one in channels.all_channels(connection) if one["id"] == channel_id))


@router.post("/channels/{channel_id}/rotate", responses={200: {"model": ChannelMade}})
def rotate_secret(channel_id: str, request: Request, services: ServicesDep, identity: AdministratorOfAll) -> Response:
    """Makes a new secret for a webhook, shown only in this answer. The old one also signs for a day, so that a receiver
    can be changed without losing a message.
    """
    audit = record(request, identity, "channel.rotate", channel_id)

    def job(connection: Connection) -> str | None:
        made = channels.rotate(connection, channel_id, time.time())
        if made is not None:
            audit(connection)
        return made

    secret = services.database.write(job)
    if secret is None:
        raise ApiError(404, "not_found", f"there is no webhook {channel_id[:80]!r}; GET /api/v1/channels lists them")
    return reply({"id": channel_id, "secret": secret})


@router.get("/channels", dependencies=[Depends(require_everywhere("admin"))], responses={200: {"model": ChannelList}})
def list_channels(services: ServicesDep) -> Response:
    """Every channel, without its secret."""
    with services.database.read() as connection:
        return reply({"channels": channels.all_channels(connection)})


@router.delete("/channels/{channel_id}", status_code=204, response_class=Response)
def delete_channel(channel_id: str, request: Request, services: ServicesDep, identity: AdministratorOfAll) -> Response:
    """Removes a channel with its deliveries, sent or not."""
    audit = record(request, identity, "channel.delete", channel_id)

    def job(connection: Connection) -> bool:
        gone = channels.remove(connection, channel_id)
        if gone:
            audit(connection)
        return gone

    if not services.database.write(job):
        raise _unknown(channel_id)
    return Response(status_code=204)


@router.post("/channels/{channel_id}/test", responses={200: {"model": DeliveryShown}})
def try_channel(channel_id: str, request: Request, services: ServicesDep, identity: AdministratorOfAll) -> Response:
    """Sends a `channel.test` message, and answers with the result. A message that arrives enables a disabled channel
    again.
    """
    audit = record(request, identity, "channel.test", channel_id)

    def job(connection: Connection) -> str | None:
        made = channels.new_test(connection, channel_id, time.time())
        if made is not None:
            audit(connection)
            note_change(connection, "delivery")
        return made

    message_id = services.database.write(job)
    if message_id is None:
        raise _unknown(channel_id)
    services.outbox.wake()
    row = services.outbox.wait(message_id, TOTAL_S + 5)
    if row is None:
        raise ApiError(504, "timeout", "the test was not tried in time; /deliveries will tell what comes of it")
    return reply(as_dict(row))


@router.get("/deliveries", responses={200: {"model": DeliveryList}})
def list_deliveries(
    services: ServicesDep,
    identity: Reader,
    channel: str | None = None,
    alert: str | None = None,
    state: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Messages to channels, newest first: waiting, delivered, given up. A user of some projects sees those about their
    runs.
    """
    if state is not None and state not in _DELIVERY_STATES:
        raise ApiError(422, "invalid", f"state is {state[:80]!r}; allowed are {', '.join(_DELIVERY_STATES)}", "state")
    query = select(delivery).order_by(delivery.c.created.desc(), delivery.c.id).limit(limit)
    for column, wanted in ((delivery.c.channel, channel), (delivery.c.alert, alert), (delivery.c.state, state)):
        if wanted is not None:
            query = query.where(column == wanted)
    if identity.seen_projects is not None:
        query = query.join(runs, runs.c.id == delivery.c.run).where(runs.c.project.in_(identity.seen_projects))
    with services.database.read() as connection:
        return reply({"deliveries": [as_dict(row) for row in connection.execute(query).mappings()]})


def _names(of: type[Any]) -> list[str]:
    return [one.name for one in fields(of)]


def _checked(services: Services, **values: Any) -> channels.NewChannel:
    """A channel that may be written. Raises ApiError."""
    try:
        wanted = channels.NewChannel(**values)
    except ConfigError as error:
        raise ApiError(422, "invalid", str(error)) from error
    try:
        channels.check_url(wanted.kind, wanted.url, services.outbox.guard)
    except AddressNotAllowed as error:
        raise ApiError(422, "address_not_allowed", str(error), "url") from error
    except ConfigError as error:
        raise ApiError(422, "invalid", str(error), "url") from error
    return wanted


def _unknown(channel_id: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no channel {channel_id[:80]!r}; GET /api/v1/channels lists them")
