"""xid: the GPU's driver reported an error."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding
from perfagent.wire.limits import whole
from perfagent_server.rules.rule import Events, Life, Question, Rule
from perfagent_server.rules.window import Noted, Window

__all__ = ["Xid"]

_MILD = frozenset({13, 31, 43, 45, 63, 68, 92, 109})
"""Codes that are a warning, as in Meta's GPU cluster monitoring (gcm); all others are critical."""
_CAUSES = {
    **dict.fromkeys((13, 31, 43, 45, 68, 109), "the program"),
    **dict.fromkeys((48, 63, 64, 92, 94, 95), "memory of the GPU"),
    74: "NVLink",
    79: "fallen off the bus",
    **dict.fromkeys((119, 120), "GSP firmware"),
}


@dataclass(frozen=True, kw_only=True)
class Xid(Rule):
    """The driver reported an Xid error of a device that the run uses. Codes: NVIDIA's Xid catalogue."""

    id = "xid"
    severities = ("warning", "critical")
    question = Question.DOES_IT_MOVE
    after = ("rank_absent",)
    reads = (Events("gpu"),)
    needs_card = True
    charts = ("gpu/xid",)
    life = Life(outlives_run=True)

    def judge(self, window: Window) -> Finding | None:
        errors = [(one, code) for one in window.events("gpu") if (code := _code_of(one)) is not None]
        if not errors:
            return None
        worst, code = next(((one, code) for one, code in errors if code not in _MILD), errors[0])
        meaning = str(worst.data.get("meaning") or "")[:200]
        return self.found(
            "warning" if code in _MILD else "critical",
            cause=_CAUSES.get(code, ""),
            since_step=worst.step if worst.step is not None else window.step,
            ranks=sorted({one.rank for one, _ in errors}),
            evidence={
                "code": code, "meaning": meaning, "index": whole(worst.data.get("index")), "uuid": worst.data.get("uuid"),
                "codes": sorted({one for _, one in errors}), "more": len(errors) - 1 or None,
                "rank": worst.rank if window.world_size > 1 else None,
            },
        )  # fmt: skip


def _code_of(event: Noted) -> int | None:
    return whole(event.data.get("code")) if event.data.get("what") == "xid" else None
