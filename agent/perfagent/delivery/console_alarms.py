"""What a job's own console says of a NaN, of memory that ran out and of a crash: one line with the cause.

Pure: an event that is about to be delivered goes in, a sentence comes out. The sender's thread prints it, once a kind
and run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["alarm"]


def alarm(kind: str, data: Mapping[str, Any], step: int) -> tuple[str, str] | None:
    """(what happened, as one word; the sentence) of an event; None for events that a console need not show.

    data: redacted. step: the last step of the run, 0 before the first.
    """
    if kind == "finding" and data.get("rule") == "nonfinite_loss":
        return _nonfinite(data)
    if kind == "finding" and data.get("rule") == "oom_observed":
        return "oom", f"out of memory. {data.get('message', '')}"
    if (
        kind == "state"
        and data.get("state") in ("failed", "oom")
        and data.get("exception") not in (None, "KeyboardInterrupt")
    ):
        reason, after = str(data.get("reason") or data["exception"]), f" after step {step}" if step else ""
        if data["state"] == "oom":
            return "oom", f"out of memory{after}. {_ended(reason)}"
        return "crash", f"the job crashed{after}. {_ended(reason)}"
    return None


def _nonfinite(data: Mapping[str, Any]) -> tuple[str, str] | None:
    evidence = data.get("evidence") or {}
    step, loss = data.get("since_step"), evidence.get("loss")
    sound = isinstance(loss, float) and math.isfinite(loss)
    if sound and "loss_scale" in evidence:
        return None  # a gradient that overflowed: GradScaler leaves such a step out and lowers its scale
    value = "NaN or infinite" if not isinstance(loss, float) else "NaN" if math.isnan(loss) else "infinite"
    what = f"gradients are NaN or infinite in step {step}" if sound else f"the loss is {value} in step {step}"
    cause = "Its cause was not found." if evidence.get("cause") == "unknown" else str(data.get("message", ""))
    return "nonfinite", f"{what}. {cause}"


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
