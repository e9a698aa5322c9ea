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
_MEANINGS = {
    13: "graphics engine exception", 31: "memory page fault", 32: "invalid or corrupted push buffer",
    43: "GPU stopped processing", 45: "preemptive cleanup after an earlier error", 48: "double-bit ECC error",
    61: "internal micro-controller breakpoint", 62: "internal micro-controller halt",
    63: "row remapping or page retirement", 64: "row remapping or page retirement failed",
    68: "video processor exception", 69: "graphics engine class error", 74: "NVLink error",
    79: "GPU has fallen off the bus", 92: "high rate of single-bit ECC errors", 94: "contained ECC error",
    95: "uncontained ECC error", 109: "context switch timeout", 119: "GSP does not answer", 120: "GSP error",
    121: "chip-to-chip link error", 140: "unrecovered ECC error", 149: "NVLink error",
}  # fmt: skip
"""By NVIDIA's catalogue of Xid errors (docs.nvidia.com/deploy/xid-errors)."""


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
        return self.found(
            "warning" if code in _MILD else "critical",
            cause=_CAUSES.get(code, ""),
            since_step=worst.step if worst.step is not None else window.step,
            ranks=sorted({one.rank for one, _ in errors}),
            evidence={
                "code": code, "meaning": _MEANINGS.get(code, ""),
                "index": whole(worst.data.get("index")), "uuid": worst.data.get("uuid"),
                "codes": sorted({one for _, one in errors}), "more": len(errors) - 1 or None,
                "rank": worst.rank if window.world_size > 1 else None,
            },
        )  # fmt: skip


def _code_of(event: Noted) -> int | None:
    return whole(event.data.get("code")) if event.data.get("what") == "xid" else None
