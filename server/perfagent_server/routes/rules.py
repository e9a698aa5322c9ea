"""The rules of this server and their thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from perfagent_server.routes.reply import reply
from perfagent_server.rules.catalogue import RULES, describe
from perfagent_server.security.access import require

__all__ = ["router"]

router = APIRouter()


@dataclass
class RuleShown:
    """reads: the series (or "state", "contact") it judges; thresholds, life: by name."""

    rule: str
    description: str
    reads: list[str]
    thresholds: dict[str, Any]
    life: dict[str, Any]


@dataclass
class RuleList:
    rules: list[RuleShown]


@router.get("/rules", dependencies=[Depends(require("read"))], responses={200: {"model": RuleList}})
def list_rules() -> Response:
    """Every rule that judges runs, what it means, and its thresholds."""
    return reply({"rules": [describe(rule) for rule in RULES]})
