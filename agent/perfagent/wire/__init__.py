"""The schema between agent, server and client. Public, documented in docs/reference/wire.md, and light: no torch, httpx or
pydantic.

What the server answers (query.py) is loaded when one of its names is asked for: a training does not, and it takes 8 ms.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from perfagent.wire.frame import (
    EVENT_KINDS,
    MAX_DECODED_BYTES,
    MAX_NAME_BYTES,
    MAX_SENT_BYTES,
    WIRE_VERSION,
    Event,
    Frame,
    Group,
    decode,
    encode,
)
from perfagent.wire.loss_names import LOGGED, LOSS, is_evaluation_loss, loss_kind
from perfagent.wire.metrics import CATALOGUE, FAMILIES, PHASES, TIMED_PHASES, Metric, metric, parts_of, whole_of

if TYPE_CHECKING:
    from perfagent.wire.query import (  # noqa: I001 - a name a line would be half of this file
        BAD_ENDS, ENDED, OUTCOMES, SEVERITIES, STATE_SHAPES, STATES, Alert, Finding, Latest, LogRow, Quantiles, RankMatrix,
        RunSummary, Series, Severity, Spent, State, StepWindow, Timing, from_json, healthy, outcome_of, plain, to_json,
    )  # fmt: skip

__all__ = [
    "BAD_ENDS", "CATALOGUE", "ENDED", "EVENT_KINDS", "FAMILIES", "LOGGED", "LOSS", "MAX_DECODED_BYTES", "MAX_NAME_BYTES",
    "MAX_SENT_BYTES", "OUTCOMES", "PHASES", "SEVERITIES", "STATES", "STATE_SHAPES", "TIMED_PHASES", "WIRE_VERSION", "Alert",
    "Event", "Finding", "Frame", "Group", "Latest", "LogRow", "Metric", "Quantiles", "RankMatrix", "RunSummary", "Series",
    "Severity", "Spent", "State", "StepWindow", "Timing", "decode", "encode", "from_json", "healthy", "is_evaluation_loss",
    "loss_kind", "metric", "outcome_of", "parts_of", "plain", "to_json", "whole_of",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'perfagent.wire' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("perfagent.wire.query"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
