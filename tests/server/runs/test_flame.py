"""A trace as a flame graph: nested calls by names, for each thread, bounded, and what is said of a trace without one."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from perfagent_server.runs.flame import MOST_NODES, FlameError, Flames, lanes


def event(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid}


def trace(*events: dict[str, Any]) -> bytes:
    return json.dumps(
        {"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name", "pid": 0}, *events]}
    ).encode()


def test_calls_are_put_together_by_what_they_run_in() -> None:
    steps = [event(f"ProfilerStep#{number}", number * 100.0, 90.0) for number in (1, 2)]
    inner = [event("linear", at, 40.0) for at in (100.0, 200.0)] + [
        event("addmm", at, 30.0) for at in (105.0, 205.0, 260.0)
    ]
    late = event("addmm", 245.0, 500.0)  # it ends after what it began in
    (lane,) = lanes(trace(*inner, *steps, late))
    flame = lane.flame
    assert lane.thread.kind == "training"
    assert lane.thread.busy_s == pytest.approx(180e-6)
    rows = {
        (flame.names[parent] if parent >= 0 else "", name): (round(1e6 * seconds), calls)
        for name, parent, seconds, calls in zip(flame.names, flame.parents, flame.seconds, flame.calls, strict=True)
    }
    assert rows["", "ProfilerStep"] == (180, 2)
    assert rows["ProfilerStep", "linear"] == (80, 2)
    assert rows["linear", "addmm"] == (60, 2)
    assert rows["ProfilerStep", "addmm"] == (45, 1), "cut off where the step ends"


def test_threads_and_streams_are_told_apart() -> None:
    found = lanes(trace(
        event("nccl", 0, 10, tid=7, cat="kernel"), event("autograd::engine::evaluate_function: Mul", 0, 30, tid=3),
        event("other", 0, 99, tid=4), event("ProfilerStep#5", 0, 50, tid=2),
    ))  # fmt: skip
    kinds = [(lane.thread.kind, lane.thread.name) for lane in found]
    assert kinds == [("training", "2"), ("backward", "3"), ("gpu", "7"), ("other", "4")]


def test_the_longest_of_very_many_are_kept_with_their_parents() -> None:
    many = [event(f"op{number}", number * 10.0, 1.0 + number / 1000) for number in range(3000)]
    (lane,) = lanes(trace(event("ProfilerStep#1", 0.0, 40_000.0), *many))
    assert len(lane.flame.names) == MOST_NODES
    assert lane.flame.left_out == 3001 - MOST_NODES
    assert lane.flame.names[0] == "ProfilerStep"
    assert set(lane.flame.parents[1:]) == {0}
    assert "op2999" in lane.flame.names


class Stored:
    """Profiles whose traces are these."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.read = pieces, 0

    def trace(self, _run: str, _profile: str) -> Any:
        self.read += 1
        return iter(self.pieces)


def test_a_trace_is_read_once_and_what_is_wrong_is_said() -> None:
    packed = gzip.compress(trace(event("a", 0, 1)))
    whole = Stored(packed[:20], packed[20:])
    flames = Flames(whole)  # type: ignore[arg-type]
    assert flames.of("r", "p")[0].flame.names == flames.of("r", "p")[0].flame.names == ["a"]
    assert whole.read == 1
    for piece, says in (
        (b"no gzip", "unpacked"), (gzip.compress(b"{"), "cannot be read"), (gzip.compress(trace()), "no events"),
        (gzip.compress(bytes(129 * 2**20), 1), "more than 128 MiB"),
    ):  # fmt: skip
        with pytest.raises(FlameError, match=says):
            Flames(Stored(piece)).of("r", "p")  # type: ignore[arg-type]
