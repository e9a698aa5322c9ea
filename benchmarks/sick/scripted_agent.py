"""A scripted agent finds the cause of a sick run through `perfagent mcp` alone:

    scripts/sick --tool benchmarks/sick/scripted_agent.py NAME ...

The protocol is fixed, and was written before any answer was seen:

1. Somebody asks it when an alert has come, and after the end of the run. It knows the name of the run and nothing else. It
   sees the JSON of the answers and nothing else, and makes these three calls: verdict(run), alerts(run), findings(run).
2. It names one cause, the first of these that there is: the verdict, if it is a warning or critical; the worst alert,
   firing or over, of two the one that began at the earlier step; the first finding that is a warning or critical; the
   verdict, whatever it is. The cause is the rule, in the words of the answer.
3. An answer of more than 4,000 bytes, or one that is no JSON, counts as none: the agent then names nothing.
4. Right is what `expected.toml` accepts, as for perfagent itself (README.md): also that no other cause was ever named.

The programs are the first twenty sick ones of the batch `unseen_1` in the order of the alphabet (PROGRAMS). The mark to
reach is 18 of them. `scripts/sick` counts the right ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from sick.tools import Perfagent, Said

PROGRAMS = (
    "bf16_rounding", "bn_last_batch", "ckpt_every_step", "clip_too_low", "empty_mask", "encoder_detached", "entropy_log_zero",
    "fd_leak", "fp16_overflow", "graph_leak", "heavy_padding", "labels_shuffled", "list_scan", "loader_deadlock",
    "lora_stale_optimizer", "lr_int_division", "lr_too_high", "majority_collapse", "overfit_trainer", "rank_long_docs",
)  # fmt: skip
MOST_BYTES = 4000
_ORDER = ("info", "warning", "critical")


class ScriptedAgent(Perfagent):
    """`said` is what the agent names, in place of what perfagent says."""

    name = "scripted agent"

    def start(self, folder: Path) -> None:
        super().start(folder)
        self._open = contextlib.ExitStack()
        self._portal: BlockingPortal = self._open.enter_context(start_blocking_portal())
        client = self._portal.call(_client, self._server.url)
        self._client = self._open.enter_context(self._portal.wrap_async_context_manager(client))

    def stop(self) -> None:
        if hasattr(self, "_client"):
            self._open.close()
        super().stop()

    def said(self, run: str) -> Said | None:
        known = super().said(run)
        if known is None or not (known.end or known.alerts):
            return known and dataclasses.replace(known, verdict={}, alerts=(), findings=())
        cause = named(*(self._asked(tool, run) for tool in ("verdict", "alerts", "findings")))
        alerts = [cause] if cause and cause["severity"] in _ORDER[1:] else []
        return dataclasses.replace(known, verdict=cause, alerts=alerts, findings=())

    def _asked(self, tool: str, run: str) -> str:
        answer = self._portal.call(self._client.call_tool, tool, {"run": run})
        return "" if answer.is_error else answer.content[0].text


async def _client(server: str) -> Any:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters

    variables = {**os.environ, "PERFAGENT_SERVER": server}
    return Client(StdioServerParameters(command=sys.executable, args=["-m", "perfagent", "mcp"], env=variables))


def named(verdict: str, alerts: str, findings: str) -> dict[str, Any]:
    """The cause by the protocol, from the three answers: rule, severity, message, fix, evidence, ranks. Empty for none."""
    answers = [_read(text) for text in (verdict, alerts, findings)]
    if None in answers:
        return {}
    judged, listed, found = answers[0], answers[1]["alerts"], answers[2]["findings"]
    worst = sorted(listed, key=lambda one: (-_ORDER.index(one["severity"]), one.get("since_step", 0)))
    loud = [one for one in (judged, *worst, *found) if one["severity"] in _ORDER[1:]]
    cause = (*loud, judged)[0]
    own = cause["untrusted"]
    words = {name: own.get(name, "") for name in ("message", "fix", "evidence")}
    severity = cause["severity"] if cause["severity"] in _ORDER else "info"
    return {"rule": own.get("rule", cause["rule"]), "severity": severity, "ranks": cause.get("ranks", []), **words}


def _read(text: str) -> Any:
    try:
        return json.loads(text) if 0 < len(text.encode()) <= MOST_BYTES else None
    except ValueError:
        return None
