"""Channels, their test, and the deliveries: an administrator's business, because they make the server send."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ConfigDict
from sqlalchemy import Connection, select
from starlette.responses import Response

from perfagent.errors import ConfigError
from perfagent_server.alerts import channels
from perfagent_server.alerts.tables import as_dict
from perfagent_server.routes.dependencies import ServicesDep
from perfagent_server.routes.problems import CLOSED, ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.security.access import Identity, require
from perfagent_server.security.audit import record
from perfagent_server.security.outbound import TOTAL_S, AddressNotAllowed
from perfagent_server.store.tables import delivery

__all__ = ["router"]

router = APIRouter()

_DELIVERY_STATES = ("waiting", "delivered", "failed")


@dataclass
class ChannelRequest:
    """secret: whsec_ and the base64 of 24 to 64 bytes; left out, one is made. min_severity: info, warning or
    critical."""

    url: str
    name: str = ""
    kind: str = "webhook"
    secret: str | None = None
    min_severity: str = "warning"

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED


@dataclass
class ChannelMade:
    id: str
    secret: str


@dataclass
class ChannelShown:
    id: str
    name: str
    kind: str
    url: str
    min_severity: str
    enabled: bool
    disabled_reason: str
    created: str
    failing_since: str | None


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
    new: ChannelRequest, request: Request, services: ServicesDep, identity: Identity = Depends(require("admin"))  # noqa: B008
) -> Response:  # fmt: skip
    """A new channel. `secret` is shown this once."""
    try:
        wanted = channels.NewChannel(
            name=new.name or new.url[:80], url=new.url, kind=new.kind, secret=new.secret, min_severity=new.min_severity
        )
    except ConfigError as error:
        raise ApiError(422, "invalid", str(error)) from error
    try:
        services.outbox.guard.check_url(new.url)
    except ConfigError as error:
        raise ApiError(422, "invalid", str(error), "url") from error
    except AddressNotAllowed as error:
        raise ApiError(422, "address_not_allowed", str(error), "url") from error
    audit = record(request, identity, "channel.create", f"{wanted.kind} {wanted.name}")

    def job(connection: Connection) -> tuple[str, str]:
        made = channels.create(connection, wanted, time.time())
        audit(connection)
        return made

    identifier, secret = services.database.write(job)
    return reply({"id": identifier, "secret": secret}, 201)


@router.get("/channels", dependencies=[Depends(require("admin"))], responses={200: {"model": ChannelList}})
def list_channels(services: ServicesDep) -> Response:
    """Every channel, without its secret."""
    with services.database.read() as connection:
        return reply({"channels": channels.all_channels(connection)})


@router.delete("/channels/{channel_id}", status_code=204, response_class=Response)
def delete_channel(
    channel_id: str, request: Request, services: ServicesDep, identity: Identity = Depends(require("admin"))  # noqa: B008
) -> Response:  # fmt: skip
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
def try_channel(
    channel_id: str, request: Request, services: ServicesDep, identity: Identity = Depends(require("admin"))  # noqa: B008
) -> Response:  # fmt: skip
    """Sends channel.test through the outbox and tells what came of it. One that arrives enables a disabled channel
    again."""
    audit = record(request, identity, "channel.test", channel_id)

    def job(connection: Connection) -> str | None:
        made = channels.new_test(connection, channel_id, time.time())
        if made is not None:
            audit(connection)
        return made

    message_id = services.database.write(job)
    if message_id is None:
        raise _unknown(channel_id)
    services.outbox.wake()
    row = services.outbox.wait(message_id, TOTAL_S + 5)
    if row is None:
        raise ApiError(504, "timeout", "the test was not tried in time; /deliveries will tell what comes of it")
    return reply(as_dict(row))


@router.get("/deliveries", dependencies=[Depends(require("read"))], responses={200: {"model": DeliveryList}})
def list_deliveries(
    services: ServicesDep,
    channel: str | None = None,
    alert: str | None = None,
    state: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Response:
    """Deliveries, newest first: what is waiting, what arrived, what was given up."""
    if state is not None and state not in _DELIVERY_STATES:
        raise ApiError(422, "invalid", f"state is {state[:80]!r}; allowed are {', '.join(_DELIVERY_STATES)}", "state")
    query = select(delivery).order_by(delivery.c.created.desc(), delivery.c.id).limit(limit)
    for column, wanted in ((delivery.c.channel, channel), (delivery.c.alert, alert), (delivery.c.state, state)):
        if wanted is not None:
            query = query.where(column == wanted)
    with services.database.read() as connection:
        return reply({"deliveries": [as_dict(row) for row in connection.execute(query).mappings()]})


def _unknown(channel_id: str) -> ApiError:
    return ApiError(404, "not_found", f"there is no channel {channel_id[:80]!r}; GET /api/v1/channels lists them")
