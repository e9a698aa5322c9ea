"""What a run is asked for: a profile, stacks, other sampling, a flush, the end. It is handed to its processes with their next
answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request
from starlette.responses import Response

from perfagent.errors import WireError
from perfagent_server.routes.dependencies import OperatedRun, Operator, SeenRun, ServicesDep
from perfagent_server.routes.problems import ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.runs.run_commands import KINDS, Order, checked
from perfagent_server.security.access import require
from perfagent_server.security.audit import record

__all__ = ["router"]

router = APIRouter()

_READ = [Depends(require("read"))]


@dataclass
class OrderList:
    commands: list[Order]


def _schema() -> dict[str, Any]:
    types = {bool: "boolean", int: "integer", float: "number"}
    properties: dict[str, Any] = {
        "kind": {"type": "string", "enum": list(KINDS)},
        "ranks": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0},
            "description": "default: 0 for profile, else all",
        },
    }
    for kind, parameters in KINDS.items():
        for name, one in parameters.items():
            bounds = {} if one.kind is bool else {"minimum": one.low, "maximum": one.high}
            properties[name] = {"type": types[one.kind], "description": f"of {kind}", **bounds}
    return {"type": "object", "required": ["kind"], "properties": properties}


@router.post(
    "/runs/{run}/commands",
    status_code=201,
    responses={201: {"model": Order}},
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _schema()}}}},
)
def ask(
    at: OperatedRun,
    asked: Annotated[dict[str, Any], Body()],
    request: Request,
    services: ServicesDep,
    identity: Operator,
) -> Response:
    """Asks the processes of a run for something. Each process gets the command with the answer to its next frame,
    within seconds while it runs; `GET` has their answers. 409 if no process can answer: they have ended, are lost, sent
    nothing for a minute, or log over HTTP without an agent. `profile`: torch.profiler for `steps` steps. `stacks`: what
    every thread is doing. `sampling`: the agent's share of the step time, and how often host and device are sampled.
    `flush`: send at once. `stop`: end the training after a step that rank 0 chooses, if its script allows it. Needs an
    operator, because a profile slows a training down.
    """
    run = at.id
    given = dict(asked)
    kind, ranks = given.pop("kind", None), given.pop("ranks", None)
    if kind is None:
        raise ApiError(422, "invalid", f"kind is missing; allowed are {', '.join(KINDS)}", "kind")
    try:
        params = checked(kind, given)
    except WireError as error:
        raise ApiError(422, "invalid", str(error), _field(kind, given)) from error
    if ranks is None:
        ranks = [0] if kind == "profile" else None
    elif not isinstance(ranks, list) or not ranks or not all(type(rank) is int and 0 <= rank < 2**31 for rank in ranks):
        message = f"ranks is {ranks!r:.80}; a list of whole numbers from 0 on, or nothing, is needed"
        raise ApiError(422, "invalid", message, "ranks")
    elif kind == "stop":
        raise ApiError(422, "invalid", "a stop takes no ranks: all of them end after the same step", "ranks")
    audit = record(request, identity, "run.command", run, kind, project=at.project)
    try:
        order = services.orders.issue(run, kind, params, ranks=ranks, who=identity.who, also=audit)
    except WireError as error:
        raise ApiError(409, "not_possible", str(error), "ranks" if str(error).startswith("rank ") else None) from error
    return reply(order, 201)


@router.get("/runs/{run}/commands", dependencies=_READ, responses={200: {"model": OrderList}})
def list_commands(run: SeenRun, services: ServicesDep, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """The commands that were sent to this run, newest first, with the answer of each process."""
    return reply({"commands": services.orders.of(run, limit)})


def _field(kind: Any, given: dict[str, Any]) -> str:
    """Which input a refusal is about."""
    if not isinstance(kind, str) or kind not in KINDS:
        return "kind"
    for name in given:
        try:
            checked(kind, {name: given[name]})
        except WireError:
            return name
    return "kind"
