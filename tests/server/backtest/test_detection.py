"""scripts/detection: what it makes of the recorded runs, and of what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from judging import DATA

from perfagent_server.backtest.replay import replay
from perfagent_server.rules import handbook
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.hardware.xid import Xid
from perfagent_server.rules.loss.loss_spike import LossSpike
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.speed.straggler import Straggler

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "benchmarks" / "detection"), str(ROOT / "benchmarks")]

import detection_report  # noqa: E402
import injected  # noqa: E402
import records  # noqa: E402
import traces  # noqa: E402

FAULT = {fault.name: fault for fault in injected.FAULTS}


def test_recorded_runs_have_origin_and_license() -> None:
    for folder in ("loss_curves", "mlperf", "incidents", "stragglers"):
        text = (DATA / folder / "README.md").read_text()
        assert "Origin: " in text and "License: " in text, folder


def test_the_recorded_runs_are_read_as_they_are() -> None:
    assert len(records.curves()) == 31
    assert len({one.family for one in records.curves()}) == 11
    assert sum(len(one.moments) for one in records.curves()) == 119_501
    first, second = records.mlperf()[0].moments[:2]
    assert (first.step, second.step) == (1, 2)
    assert first.values == {"loss": 2.780529260635376, "step_time_s": 12.160857439041138}
    assert second.time - first.time == pytest.approx(second.values["step_time_s"], abs=0.1)
    rows = [row for row in records.rows_of_chronicles() if row["iteration"] in (29050, 31219)]
    tr1, bloom = records.moments_of_rows(rows)
    assert (tr1.values["amp/scale"], bloom.values["step_time_s"]) == (8192.0, 106.36)
    assert "amp/scale" not in bloom.values


def test_slowed_worker_of_a_trace_is_named_not_long_sequences() -> None:
    """The target of every straggler rule."""
    slowed, unequal = traces.read_trace("AR"), traces.read_trace("SE")
    assert (len(slowed.workers), len(set(slowed.stages)), slowed.slow) == (16, 4, [0])
    assert (len(unequal.workers), len(set(unequal.stages)), unequal.slow) == (64, 2, [])
    plan = Plan((Straggler(),))
    assert [alert.ranks for alert in replay(slowed.moments, plan).alerts] == [(0,)]
    assert replay(unequal.moments, plan).alerts == []


def test_fault_is_found_in_its_steps_at_the_same_places() -> None:
    fault = FAULT["loss becomes NaN and stays so"]
    first, again = (injected.try_out(fault, records.mlperf(), 5) for _ in range(2))
    assert first == again
    assert (first.total, first.found, first.early) == (5, 5, 0)
    assert max(first.latencies) <= 1


RESULTS: dict[str, Any] = {
    "day": "2026-01-01",
    "healthy": [
        {
            "run": "a", "family": "f", "kind": "curves", "steps": 1000, "series": ["loss"],
            "alerts": [
                {"rule": "loss_spike", "severity": "warning", "first_step": 7, "message": "up | down"},
                {"rule": "loss_spike", "severity": "info", "first_step": 9, "message": "a remark"},
            ],
        },
        {"run": "b", "family": "g", "kind": "curves", "steps": 500, "series": ["lr"], "alerts": []},
    ],
    "faults": [
        {
            "fault": "loss jumps by 0.5 nat and stays", "rule": "loss_spike", "within": 10, "needs": ["loss"], "chosen": False,
            "found": 3, "total": 4, "latencies": [2, 4, 9], "early": 0,
        }
    ],
    "incidents": [],
    "traces": [{"trace": "AR", "ranks": 4, "stages": 2, "steps": 44, "slow": [0], "rules": ["straggler"], "alerts": []}],
    "gpu_jobs": [{"job": "copies", "steps": 300, "rules": ["h2d_bound"], "alerts": []}],
}  # fmt: skip


def test_precision_and_recall_are_of_the_rules_own_faults() -> None:
    found = detection_report.summaries(RESULTS)["loss_spike"]
    assert (found.steps, found.alerts, found.found, found.total) == (1000, 1, 3, 4)
    assert (found.precision, found.recall) == (0.75, 0.75)
    assert (found.tested_steps, found.tested_false) == (0, 0)  # its thresholds were chosen on such curves
    [straggler] = [one for rule, one in detection_report.summaries(RESULTS).items() if rule == "straggler"]
    assert (straggler.found, straggler.total) == (0, 1)


def test_every_rule_has_a_row_with_or_without_data(tmp_path: Path) -> None:
    """Steps on which nothing was chosen are counted for themselves."""
    tested = {
        "run": "c", "family": records.MLPERF, "kind": "mlperf", "steps": 20, "series": ["loss"],
        "alerts": [{"rule": "loss_spike", "severity": "warning", "first_step": 7, "message": "up"}],
    }  # fmt: skip
    sections = detection_report.sections(RESULTS | {"healthy": [*RESULTS["healthy"], tested]}, tmp_path)
    rows = {line.split("|")[1].strip(" `"): line for line in sections["rules"].splitlines() if line.startswith("| `")}
    assert set(rows) == {rule.id for rule in all_rules()}
    assert "| `loss_spike` | 1,000 | 1 | 20 | 1 | 0.600 (3/5) | 0.750 (3/4) |" in rows["loss_spike"]
    assert "no recorded runs: tested on synthetic series" in rows["host_memory_leak"]
    assert "not yet seen on a card" in rows["xid"]
    assert sections["healthy"].count("- `loss_spike` (warning) in step 7 of a: up | down\n") == 1


def test_the_handbook_tells_what_was_measured_of_a_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = {"loss_spike": detection_report.plain(detection_report.summaries(RESULTS), tmp_path)["loss_spike"]}
    monkeypatch.setattr(handbook, "MEASURED", tmp_path / "measured.json")
    handbook.MEASURED.write_text(json.dumps(figures))
    assert handbook.measured(LossSpike()) == (
        "precision 0.750 (3 of 4 alerts), recall 0.750 (3 of 4 faults, within 9 steps; median 4); 1 false alert; 1,000 "
        "healthy steps: thresholds were chosen with a look at them ([detection.md](../evidence/detection.md))."
    )
    assert handbook.measured(Straggler()) == "no labeled data: tested on synthetic series."
    figures["straggler"] = {"programs": {"should": 3, "named": 2, "healthy": 9, "healthy_false": 0}}
    handbook.MEASURED.write_text(json.dumps(figures))
    assert handbook.measured(Straggler()) == (
        "named in 2 of 3 sick programs; no false alarm in 9 healthy programs "
        "([detection.md](../evidence/detection.md#sick-trainings))."
    )
    assert handbook.measured(Xid()).startswith("not yet seen on a card")


def test_handbook_sections_have_remedies_and_measurements() -> None:
    text = handbook.handbook({})
    for rule in all_rules():
        assert f"**What to do:** {rule.text().remedies['']}\n" in text, rule.id
    assert "- *:*" not in text
    assert text.count("**Measured:** ") == len(all_rules())
