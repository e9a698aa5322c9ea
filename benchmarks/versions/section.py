"""The section of docs/evidence/compatibility.md about versions, and its results: benchmarks/results/versions.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from versions.catalogue import ROOT, TRAININGS, numbers, trainings

__all__ = ["KEPT", "in_words", "is_right", "keep", "kept", "written"]

KEPT = ROOT / "benchmarks" / "results" / "versions.json"

_HEAD = """\
## Versions of torch and Python

Measured by `scripts/versions`, which makes an environment for each row, on a machine without a GPU (Linux, x86-64). *Unit tests*:
those of the agent; with an older torch, the files of them that import torch. *Trainings*: the rows above that need torch alone,
each trained without the agent and with it; results are bit-equal, and each value is compared. *Demo*:
`perfagent demo --fault nan`, that is server, training, alert and verdict. With an older or newer torch, perfagent says once
that some signals may be missing.

| torch | Python | unit tests | trainings | demo | day |
|---|---|---|---|---|---|
"""


_GAPS = (
    "Up to torch 2.10, perfagent reports each recompilation, but not that a function has reached the limit, and `perfagent "
    "stacks` does not list the last collectives of gloo: torch keeps no record of either.",
    "With torch 2.4 and 2.6, the cause of a NaN names the module but not the operator, and the loss of a script that divides by "
    "the items of each micro-batch is their sum.",
    "With torch 2.4 and 2.5, clipping does not say its norm: gradients are measured as often as without it.",
    "With torch 2.4 and 2.6, the loss of a pipeline schedule is the mean over the micro-batches, although torch minimizes "
    "their sum.",
    "With torch 2.4, a training with FSDP's first version and clipping was not bit-equal with perfagent in three of three "
    "trials. Why is not known; torch 2.4 adds the norms up in the order of a set there.",
    "With torch 2.4, FLOPs are counted without their type, and those of convolutions by their modules.",
    "With torch 2.4 and 2.5, recompilations are counted, and not reported with their reasons.",
)
"""What is missing with an older torch."""
_MOST_NAMED = 5


def kept() -> list[dict[str, Any]]:
    return json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else []


def keep(result: dict[str, Any]) -> dict[str, Any]:
    """In the place of an earlier result of the same versions, of which the parts that are not in this one stay. Returns both."""
    results = {_versions(one): one for one in kept()}
    whole = results[_versions(result)] = results.get(_versions(result), {}) | result
    KEPT.write_text(json.dumps([results[versions] for versions in sorted(results)], indent=1) + "\n", "utf-8")
    return whole


def written(results: Sequence[dict[str, Any]]) -> str:
    """The section."""
    rows = [
        (one["torch"], one["python"], _share(one.get("unit")), _share(one.get("trainings")), _demo(one), one["day"])
        for one in results
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"- {note}" for note in (*_later(), *_GAPS, *_failures(results))]
    return f"{_HEAD}" + "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n"


def is_right(result: dict[str, Any]) -> bool:
    """Whether all was measured, and nothing of it is wrong."""
    whole = result.get("trainings", {}).get("passed") == len(trainings(result["torch"]))
    return whole and "unit" in result and not _failed(result) and result.get("demo") == ""


def in_words(result: dict[str, Any]) -> str:
    """A line for the terminal, and one for each failure."""
    line = (
        f"torch {result['torch']}, Python {result['python']}: unit tests {_share(result.get('unit'))}, "
        f"trainings {_share(result.get('trainings'))}, demo {_demo(result)}"
    )
    return "\n".join([line, *(f"  {name}: {why}" for name, why in _failed(result).items())])


def _failed(result: dict[str, Any]) -> dict[str, str]:
    """name of a test -> why it failed."""
    return result.get("unit", {}).get("failed", {}) | result.get("trainings", {}).get("failed", {})


def _demo(result: dict[str, Any]) -> str:
    return result.get("demo", "not run") or "right"


def _versions(result: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return numbers(result["torch"]), numbers(result["python"])


def _share(part: dict[str, Any] | None) -> str:
    if part is None:
        return "not run"
    skipped = f", {part['skipped']} skipped" if part["skipped"] else ""
    return f"{part['passed']} of {part['passed'] + len(part['failed'])}{skipped}"


def _later() -> list[str]:
    """What not every torch can train on the CPU."""
    later: dict[tuple[int, int], list[str]] = {}
    for row in TRAININGS:
        if row.since > TRAININGS[0].since:
            later.setdefault(row.since, []).append(f"*{row.name}*")
    return [
        f"Not before torch {'.'.join(map(str, since))}: {'; '.join(names)}." for since, names in sorted(later.items())
    ]


def _failures(results: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"torch {one['torch']}, Python {one['python']}: {_failed_words(_failed(one))}."
        for one in results
        if _failed(one)
    ]


def _failed_words(failed: dict[str, str]) -> str:
    if len(failed) > _MOST_NAMED:
        return f"{len(failed)} fail, which benchmarks/results/versions.json names"
    parts = [name.partition("::") for name in failed]
    names = ", ".join(f"`{module.rpartition('.')[2]}::{test}`" for module, _, test in parts)
    return f"{names} {'fails' if len(failed) == 1 else 'fail'}"
