"""What a script knows of its training beside what was recorded of it."""

from __future__ import annotations

import math

from agent_recorded import Recorded
from libraries.running import Ran

__all__ = ["COLUMNS", "compared"]

COLUMNS = {
    "bit-equal": "losses, rates, final weights and random states are the same without the agent and with it",
    "console": "the agent prints nothing but the address of the run",
    "end": "the run is `finished` when the script is",
    "steps": "every optimizer step has its number, from 1 on without a gap",
    "loss": "the loss of every step, to 1 part in 10⁶",
    "rate": "the learning rate of every step",
    "samples": "exactly what the script consumed, from the second step on (the fourth if the batches come from a replay memory)",
    "evaluations": "`phase/eval_s` has a value wherever the script evaluates",
}
"""Column -> what it means that it is right."""


def compared(alone: Ran, watched: Ran, sources: list[Recorded]) -> dict[str, str]:
    """Column -> what is wrong there, empty where nothing is. A column that the script knows nothing of is not there."""
    source = max(sources, key=lambda one: len(one.series), default=Recorded(None, 0, 0, {}, []))
    state = source.states[-1]["state"] if source.states else "not told"
    steps = watched.truth["steps"]
    numbered = dict(enumerate(steps, start=1))
    known = {
        name: {n: step[name] for n, step in numbered.items() if step.get(name) is not None}
        for name in ("loss", "lr", "samples")
    }
    found = {
        "bit-equal": ""
        if alone.truth == watched.truth
        else "what the training produces is not the same with the agent",
        "console": _ours(alone.output, watched.output),
        "end": ""
        if state == "finished" and len(sources) == 1
        else f"{len(sources)} processes recorded, the state is {state}",
        "steps": _gaps(set(numbered), set(source.series.get("step_time_s", {})) | set(source.series.get("loss", {}))),
        "loss": _wrong(known["loss"], source.series.get("loss", {}), 1e-6),
        "rate": _wrong(known["lr"], source.series.get("lr", {}), 1e-12),
        "samples": _wrong({n: count for n, count in known["samples"].items() if n > 1}, _samples(source), 1e-6),
        "evaluations": _unseen(watched.truth["evaluations"], len(steps), source.series.get("phase/eval_s", {})),
    }
    absent = {"loss": not known["loss"], "rate": not known["lr"], "samples": not known["samples"]}
    absent["evaluations"] = not watched.truth["evaluations"]
    return {column: found[column] for column in COLUMNS if not absent.get(column)}


def _ours(alone: str, watched: str) -> str:
    before = set(alone.splitlines())
    lines = [line for line in watched.splitlines() if "perfagent" in line.lower() and line not in before]
    ours = [line for line in lines if not line.startswith("perfagent: watch it at ")]
    return f"printed: {ours[0][:200]}" if ours else ""


def _gaps(made: set[int], told: set[int]) -> str:
    if not made:
        return "the script made no step"
    return (
        ""
        if made == told
        else f"{len(made)} made; missing {sorted(made - told)[:5]}, not made {sorted(told - made)[:5]}"
    )


def _wrong(known: dict[int, float], told: dict[int, float], tolerance: float) -> str:
    absent = math.nan
    wrong = [n for n in known if not math.isclose(told.get(n, absent), known[n], rel_tol=tolerance, abs_tol=1e-12)]
    first = ", ".join(f"step {n}: {told.get(n)} instead of {known[n]}" for n in wrong[:2])
    return f"{len(wrong)} of {len(known)} wrong, {first}" if wrong else ""


def _samples(source: Recorded) -> dict[int, float]:
    taken = source.series.get("step_time_s", {})
    return {n: rate * taken[n] for n, rate in source.series.get("samples_per_s", {}).items() if n in taken}


def _unseen(evaluations: list[int], steps: int, told: dict[int, float]) -> str:
    """What is evaluated between two steps is told with the later one, what comes after the last step with that."""
    unseen = [after for after in evaluations if not told.get(min(after + 1, steps))]
    return f"{len(unseen)} of {len(evaluations)} not told, after the steps {unseen[:5]}" if unseen else ""
