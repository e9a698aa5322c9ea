"""A18 to A20, from a script's log call to what the server tells: clocks that jump, values and names of every kind. Each
kind of number by itself is in tests/agent/delivery/test_columns.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from builders import ServerProcess, run_job

from perfagent.wire.limits import MAX_NAMES_PER_RUN, room_of

pytestmark = [pytest.mark.fault, pytest.mark.real]


# ---- A18

JUMPS = """
import time
real, offset = time.time, [0.0]
time.time = lambda: real() + offset[0]
import perfagent
run = perfagent.init(run_id="jumps", project="faults")
for step in range(1, 41):
    offset[0] = {5: 86400.0, 12: -86400.0, 20: -1.7e9, 25: 9e9, 30: float("nan"), 33: 3600.0, 36: 0.0}.get(step, offset[0])
    run.log({"loss": 1.0 / step}, step=step)
    time.sleep(0.05)
run.finish()
"""


def test_a18_clock_that_jumps_leaves_order_and_run_as_they_are(shared_server: ServerProcess, tmp_path: Path) -> None:
    run_job(JUMPS, tmp_path, shared_server.url)
    summary = shared_server.wait_for_state("jumps", "finished")
    assert summary["step"] == 40
    series = shared_server.get("/runs/jumps/series", name="loss")
    assert series["step"] == list(range(1, 41))
    assert series["mean"] == [1.0 / step for step in range(1, 41)]
    rows = [row for row in shared_server.export("jumps") if row["name"] == "loss"]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert all(isinstance(row["time"], float) and math.isfinite(row["time"]) for row in rows)
    for path in ("", "/latest", "/verdict", "/findings", "/alerts"):
        shared_server.get(f"/runs/jumps{path}")
    measured = [row for row in shared_server.export("jumps") if row["name"].endswith(("_s", "_pct", "_bytes"))]
    assert [row for row in measured if isinstance(row["value"], float) and row["value"] < 0] == []


# ---- A19

SPECIAL = """
import perfagent
run = perfagent.init(run_id="special", project="faults")
values = [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1.7976931348623157e308, 0.1, 1 / 3]
values += [2**53 + 1, 2**70, 10**400, -10**400]
for step, value in enumerate(values):
    run.log({"value": value, "loss": value}, step=step)
run.log({"text": "1.0", "none": None, "complex": 1j, "list": [1.0], "fine": 1.0}, step=99)
run.finish()
"""


def test_a19_what_is_not_finite_is_told_as_it_is_everywhere(shared_server: ServerProcess, tmp_path: Path) -> None:
    run_job(SPECIAL, tmp_path, shared_server.url)
    shared_server.wait_for_state("special", "finished")
    rows = {row["step"]: row["value"] for row in shared_server.export("special") if row["name"] == "value"}
    told = ["NaN", "Infinity", "-Infinity", -0.0, 5e-324, 1.7976931348623157e308, 0.1, 1 / 3, 2.0**53, 2.0**70]
    assert [rows[step] for step in range(12)] == [*told, "Infinity", "-Infinity"]
    assert math.copysign(1.0, rows[3]) == -1.0
    series = shared_server.get("/runs/special/series", name="value")
    assert series["nonfinite"][0] == 1
    assert "null" not in json.dumps(series["mean"])
    latest = shared_server.get("/runs/special/latest")
    assert latest["value"]["value"] == "-Infinity"
    assert latest["fine"]["value"] == 1.0
    assert not {"text", "none", "complex", "list"} & set(latest)
    for path in ("", "/verdict", "/findings", "/alerts"):
        shared_server.get(f"/runs/special{path}")
    assert shared_server.get("/runs/special/ranks", name="loss")["ranks"] == [0]


# ---- A20

NAMES = """
import resource, time
from pathlib import Path
import perfagent
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
run = perfagent.init(run_id="names", project="faults")
odd = ["", "x" * 10_000, "a\\0b", "\\ud800", "\\u202eabc", "\\U0001f4c9/loss", "../../etc/passwd", "<script>alert(1)</script>",
    "'; DROP TABLE run; --", "%s%n", "{{7*7}}", " ", "\\n", "a" * 255 + "\\u00e9", "NaN", "constructor", "__proto__"]
run.log({name: float(n) for n, name in enumerate(odd)}, step=1)
assert run._sender.flush(30)
before = resident()
for block in range(100):
    run.log({f"many/{block}/{n}": 1.0 for n in range(1000)}, step=2 + block)
    run._sender.flush(30)
counters, end = run._sender.counters, time.monotonic() + 30
while counters["refused_series"] < 98_000 and time.monotonic() < end:  # the sender may be behind on a busy machine
    time.sleep(0.05)
print(resident() - before, counters["refused_series"], counters["refused_name"])
run.finish()
"""


def test_a20_odd_names_are_stored_and_very_many_cost_no_memory(shared_server: ServerProcess, tmp_path: Path) -> None:
    grown, refused_series, refused_names = map(int, run_job(NAMES, tmp_path, shared_server.url).split())
    shared_server.wait_for_state("names", "finished")
    latest = shared_server.get("/runs/names/latest")
    assert all(len(name.encode()) <= 256 and name for name in latest)
    assert {"../../etc/passwd", "<script>alert(1)</script>", "'; DROP TABLE run; --", "__proto__", "x" * 256} <= set(
        latest
    )
    users = [name for name in latest if room_of(name) == "user"]
    assert len(users) <= MAX_NAMES_PER_RUN
    assert len(latest) - len(users) <= 50, "what the agent measures has a place of its own"
    assert refused_names == 1
    assert refused_series >= 98_000
    assert grown <= 16 * 2**20
    # and what samplers had to leave out at the end
    assert latest["agent/dropped"]["value"] >= refused_series + refused_names
    for name in ("<script>alert(1)</script>", "../../etc/passwd", "'; DROP TABLE run; --"):
        assert shared_server.get("/runs/names/series", name=name)["count"] == [1]
