"""What runs sent back when asked: profiles with their traces, and the stacks of their threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response, StreamingResponse

from perfagent_server.routes.dependencies import SeenRun, ServicesDep
from perfagent_server.routes.problems import ApiError
from perfagent_server.routes.reply import reply
from perfagent_server.runs.flame import BusyError, Flame, FlameError, FlameThread
from perfagent_server.security.access import require
from perfagent_server.services import Services
from perfagent_server.store.artifacts import Stacks, StoredProfile, stacks_of

__all__ = ["router"]

router = APIRouter()

_READ = [Depends(require("read"))]


@dataclass
class ProfileList:
    profiles: list[StoredProfile]


@dataclass
class SameStack:
    """Ranks whose training threads were at the same place. frames: innermost last."""

    ranks: list[int]
    frames: list[str]


@dataclass
class StackList:
    """groups: ranks by what their training threads were doing, the smallest group first: in a hang, that is the odd one
    out."""

    stacks: list[Stacks]
    groups: list[SameStack]


@dataclass
class FlameShown:
    """threads: of the trace, that of the steps first; thread: the place of the one that is shown."""

    threads: list[FlameThread]
    thread: int
    flame: Flame


@router.get("/runs/{run}/profiles", dependencies=_READ, responses={200: {"model": ProfileList}})
def list_profiles(run: SeenRun, services: ServicesDep) -> Response:
    """Profiles of a run, newest first, each with its five most expensive operators. `POST /runs/{run}/commands` asks
    for one.
    """
    return reply({"profiles": services.profiles.of(run)})


@router.get("/runs/{run}/profiles/{profile}/operators", dependencies=_READ, responses={200: {"model": StoredProfile}})
def operators(run: SeenRun, profile: str, services: ServicesDep) -> Response:
    """One profile with all its operators: calls, and time on the CPU and on the device, of their own and with the
    operators that they call.
    """
    return reply(_known(services, run, profile))


@router.get(
    "/runs/{run}/profiles/{profile}",
    dependencies=_READ,
    response_class=StreamingResponse,
    responses={200: {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}},
)
def trace(run: SeenRun, profile: str, services: ServicesDep) -> Response:
    """The trace of a profile, gzip-compressed JSON. Open it as it is at https://ui.perfetto.dev or in chrome://tracing."""
    found = _with_trace(services, run, profile)
    headers = {
        "Content-Disposition": f'attachment; filename="{found.id[:12]}-rank{found.rank}.pt.trace.json.gz"',
        "Content-Length": str(found.trace_bytes),
        "Content-Encoding": "identity",  # it is compressed already: nobody should do it again on the way
    }
    return StreamingResponse(services.profiles.trace(run, profile), media_type="application/gzip", headers=headers)


@router.get("/runs/{run}/profiles/{profile}/flame", dependencies=_READ, responses={200: {"model": FlameShown}})
def flame(
    run: SeenRun, profile: str, services: ServicesDep, thread: Annotated[int, Query(ge=0, le=99)] = 0
) -> Response:
    """A flame graph of one thread or GPU stream of the trace, combined by names: the 2,000 entries with the most time."""
    _with_trace(services, run, profile)
    try:
        lanes = services.flames.of(run, profile)
    except BusyError as error:
        raise ApiError(503, "busy", str(error)) from error
    except FlameError as error:
        raise ApiError(422, "no_flame", str(error), "profile") from error
    if thread >= len(lanes):
        raise ApiError(422, "invalid", f"thread is {thread}; this trace has 0 to {len(lanes) - 1}", "thread")
    return reply(FlameShown([lane.thread for lane in lanes], thread, lanes[thread].flame))


@router.get("/runs/{run}/stacks", dependencies=_READ, responses={200: {"model": StackList}})
def stacks(run: SeenRun, services: ServicesDep, command: str | None = None) -> Response:
    """The stack of every thread of each rank, when it was asked last, or at the given command."""
    found = stacks_of(services.database, run, command=command)
    return reply(StackList(found, _grouped(found)))


def _grouped(found: list[Stacks]) -> list[SameStack]:
    groups: dict[tuple[str, ...], list[int]] = {}
    for one in found:
        training = [thread for thread in one.threads if isinstance(thread, dict) and thread.get("training")]
        frames = training[0].get("frames") if training else None
        if isinstance(frames, list):
            groups.setdefault(tuple(str(frame) for frame in frames), []).append(one.rank)
    return [
        SameStack(ranks, list(frames))
        for frames, ranks in sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    ]


def _with_trace(services: Services, run: str, profile: str) -> StoredProfile:
    found = _known(services, run, profile)
    if found.trace == "none":
        raise ApiError(
            404, "not_found", found.note or "this profile has no trace; its operators are at .../operators", "profile"
        )
    if found.trace == "arriving":
        raise ApiError(409, "not_ready", "the trace is still arriving; try again in some seconds", "profile")
    return found


def _known(services: Services, run: str, profile: str) -> StoredProfile:
    found = services.profiles.get(run, profile)
    if found is None:
        raise ApiError(
            404, "not_found", f"this run has no profile {profile[:80]!r}; GET .../profiles lists them", "profile"
        )
    return found
