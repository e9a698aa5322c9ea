"""benchmarks/results/sick.json: of each program its first try, which stays, and its newest results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sick.judging import Judgment

__all__ = ["RESULTS", "Kept", "keep", "outcome", "read", "write"]

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "sick.json"

Kept = dict[str, dict[str, Any]]
"""By batch/program. first: when, on which commit, and what came of it. newest: the same for the newest suite, and its
runs: what came of each."""


def outcome(judgment: Judgment) -> dict[str, Any]:
    """What is kept of a judgment."""
    return {
        "right": judgment.right, "silent": judgment.silent, "verdict": judgment.verdict, "faults": [*judgment.faults],
        "named": [*judgment.named], "false": [*judgment.false], "latency_s": judgment.latency_s, "cause": judgment.cause,
    }  # fmt: skip


def keep(kept: Kept, record: Mapping[str, Any], judgment: Judgment) -> None:
    """The first try of a program stays as it is. A suite that began earlier than the one that is kept changes nothing."""
    key = f"{record['batch']}/{record['program']}"
    suite = {name: record[name] for name in ("began", "commit", "busy")}
    known = kept.setdefault(key, {"batch": record["batch"], "program": record["program"]})
    known.setdefault("first", suite | outcome(judgment))
    newest = known.get("newest", {"began": ""})
    if newest["began"] < suite["began"]:
        newest = known["newest"] = suite | {"runs": []}
    if newest["began"] == suite["began"]:
        at = record["run"] - 1
        newest["runs"][at : at + 1] = [outcome(judgment)]


def read(file: Path = RESULTS) -> Kept:
    rows = json.loads(file.read_text("utf-8")) if file.exists() else []
    return {f"{row['batch']}/{row['program']}": row for row in rows}


def write(kept: Kept, order: Iterable[str], file: Path = RESULTS) -> None:
    """order: the keys of all programs; what is kept of others goes."""
    lines = ",\n".join(f" {json.dumps(kept[key], ensure_ascii=False)}" for key in order if key in kept)
    file.write_text(f"[\n{lines}\n]\n", "utf-8")
