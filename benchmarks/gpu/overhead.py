"""What a step costs more with the agent: two processes on the same device, with it and without it, take turns."""

from __future__ import annotations

import statistics

from report import Result
from stage import Stage
from training import Child, recorded

CASES = (("real", 25, 12, 0.15), ("small", 400, 16, 0.7))  # size, steps of a block, rounds, percent that it may cost


def check(stage: Stage) -> list[Result]:
    cases = CASES[:1] if stage.dry else CASES  # they differ in size only, and a dry run has one size
    return [result for case in cases for result in _case(stage, *case)]


def _case(stage: Stage, size: str, steps: int, rounds: int, most_pct: float) -> list[Result]:
    steps, rounds = stage.steps(steps), 2 if stage.dry else rounds
    bare = Child(stage.size(size), stage.device, record=None)
    folder = stage.recording(f"overhead-{size}")
    watched = Child(stage.size(size), stage.device, record=folder)
    for child in (bare, watched):
        child.ask(f"block {stage.steps(60)}")
    walls: list[float] = []
    cpus: list[float] = []
    bare_s: list[float] = []
    for number in range(rounds):
        pair = {}
        for child in (bare, watched) if number % 2 else (watched, bare):
            pair[child] = child.ask(f"block {steps}")
        walls.append(100 * (pair[watched]["wall_s"] / pair[bare]["wall_s"] - 1))
        cpus.append((pair[watched]["cpu_s"] - pair[bare]["cpu_s"]) / steps * 1e6)
        bare_s.append(pair[bare]["wall_s"] / steps)
    for child in (bare, watched):
        child.end()
    low, middle, high = statistics.quantiles(walls, n=4)
    step_ms = statistics.median(bare_s) * 1e3
    spread = f"median of {rounds} rounds; half of them from {low:+.2f} to {high:+.2f} %"
    told = len(recorded(folder).values("loss"))
    if told < rounds * steps:  # an agent that does nothing costs nothing
        spread += f"; only {told} of {rounds * steps} steps were recorded"
    passed = middle <= most_pct and told >= rounds * steps
    return [
        Result(
            f"overhead of a step of {step_ms:.1f} ms ({stage.size(size)} transformer)",
            f"at most {most_pct:g} %",
            f"{middle:+.3f} % ({spread})",
            "pass" if passed else "FAIL",
        ),
        Result(
            "... of it CPU of the training thread",
            "at most 60 µs a step",
            f"{statistics.median(cpus):.1f} µs",
            "pass" if statistics.median(cpus) <= 60 else "FAIL",
        ),
    ]
