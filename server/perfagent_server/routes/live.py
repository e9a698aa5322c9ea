"""/ws/live: see perfagent_server/live/hub.py for what goes over it."""

from __future__ import annotations

from fastapi import APIRouter, WebSocket
from starlette.responses import Response

from perfagent_server.live.hub import Hub
from perfagent_server.refusal import RefusalError
from perfagent_server.routes.problems import of_refusal
from perfagent_server.security.access import Access, authorize

__all__ = ["router"]

router = APIRouter()


@router.websocket("/ws/live")
async def live(socket: WebSocket) -> None:
    """{"subscribe": {...}} in; {"samples"}, {"bands"}, {"fleet"}, {"run"}, {"alert"}, {"lagged"} out, of the projects that
    the caller may see. Origin and Host: routes/edge.py."""
    try:
        identity = await authorize(socket, "read")
    except RefusalError as error:
        response: Response = of_refusal(error).response()
        await socket.send_denial_response(response)
        return
    await socket.accept()
    hub: Hub = socket.app.state.services.hub
    access: Access = socket.app.state.access
    projects = identity.seen_projects
    await hub.serve(socket, lambda: access.still_sees(socket, projects), projects)
