"""Registers the tools with the SDK of the Model Context Protocol."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent, ToolAnnotations

from perfagent import __version__
from perfagent.errors import PerfagentError
from perfagent_client.mcp.answer import Answer
from perfagent_client.mcp.tools import INSTRUCTIONS, Tools

__all__ = ["server_of"]

_READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)


def server_of(tools: Tools) -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer(
        "perfagent", version=__version__, instructions=INSTRUCTIONS, log_level="ERROR", subscriptions=False
    )
    for tool in tools.all():
        text = " ".join((inspect.getdoc(tool) or "").split())
        server.add_tool(_answering(tool), description=text, annotations=_READS, structured_output=False)
    return server


def _answering(tool: Callable[..., str]) -> Callable[..., CallToolResult]:
    """An error's words may quote a run, too."""

    @functools.wraps(tool)
    def answer(*given: Any, **named: Any) -> CallToolResult:
        try:
            return CallToolResult(content=[TextContent(type="text", text=tool(*given, **named))])
        except (
            PerfagentError,
            UnicodeError,
        ) as error:  # the second: half of a surrogate pair, which no address can have
            made = Answer()
            text = made.written({"untrusted": {"error": made.text(error, 1000)}})
            return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)

    return answer
