"""scripts/detection: what it makes of the recorded runs, and of what it measured."""

from __future__ import annotations

import itertools
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
import incidents  # noqa: E402
import injected  # noqa: E402
import records  # noqa: E402
import traces  # noqa: E402

FAULT = {fault.name: fault for fault in injected.FAULTS}


def test_every_folder_of_recorded_runs_tells_its_origin_and_license() -> None:
    for folder in ("loss_curves", "mlperf", "incidents", "stragglers"):
        text = (DATA / folder / "README.md").read_text()
        assert "Origin: " in text and "License: " in text, folder


def test_the_recorded_curves_are_31_runs_of_eleven_families() -> None:
    assert len(records.curves()) == 31
    assert len({one.family for one in records.curves()}) == 11
    assert sum(len(one.moments) for one in records.curves()) == 119_501


def test_mlperf_results_have_loss_and_step_time_at_their_own_times() -> None:
    first, second = records.mlperf()[0].moments[:2]
    assert (first.step, second.step) == (1, 2)
    assert first.values == {"loss": 2.780529260635376, "step_time_s": 12.160857439041138}
    assert second.time - first.time == pytest.approx(second.values["step_time_s"], abs=0.1)


def test_log_points_of_the_chronicles_leave_out_what_they_do_not_say() -> None:
    rows = [row for row in records.rows_of_chronicles() if row["iteration"] in (29050, 31219)]
    tr1, bloom = records.moments_of_rows(rows)
    assert tr1.values == {
        "loss": 7.343709, "grad/norm": 0.0, "amp/scale": 8192.0, "lr": 9.849e-05, "step_time_s": 22.1485,
    }  # fmt: skip
    assert bloom.values == {"loss": 5.098124, "grad/norm": 960.351, "lr": 5.279e-05, "step_time_s": 106.36}
    assert bloom.time - tr1.time == pytest.approx(106.36)


def test_an_incident_follows_on_made_up_healthy_steps_at_its_first_level() -> None:
    bloom = incidents.INCIDENTS[0]
    rows = bloom.rows(seed=1)
    made_up, real = rows[: incidents.BEFORE], rows[incidents.BEFORE :]
    assert [row["iteration"] for row in made_up[-2:]] == [31212, 31213]
    assert sum(row["grad_norm"] for row in made_up) / len(made_up) == pytest.approx(0.242, rel=0.05)
    assert [row["iteration"] for row in real] == [*range(31214, 31223), 31250, 31251]
    assert real[0]["grad_norm"] == 0.242


def test_the_slowed_worker_of_a_trace_is_named_and_unequal_sequences_are_no_worker() -> None:
    """The target of every straggler rule."""
    slowed, unequal = traces.read_trace("AR"), traces.read_trace("SE")
    assert (len(slowed.workers), len(set(slowed.stages)), slowed.slow) == (16, 4, [0])
    assert (len(unequal.workers), len(set(unequal.stages)), unequal.slow) == (64, 2, [])
    plan = Plan((Straggler(),))
    assert [alert.ranks for alert in replay(slowed.moments, plan).alerts] == [(0,)]
    assert replay(unequal.moments, plan).alerts == []


def test_the_phases_of_a_traced_worker_add_up_to_its_step() -> None:
    for moment in traces.read_trace("AR").moments:
        if moment.values:
            phases = sum(value for name, value in moment.values.items() if name.startswith("phase/"))
            assert phases == pytest.approx(moment.values["step_time_s"])


def test_a_fault_is_found_in_its_steps_and_its_places_are_the_same_each_time() -> None:
    fault = FAULT["loss becomes NaN and stays so"]
    first, again = (injected.try_out(fault, records.mlperf(), 5) for _ in range(2))
    assert first == again
    assert (first.total, first.found, first.early) == (5, 5, 0)
    assert max(first.latencies) <= 1


def test_an_alert_after_the_time_of_a_fault_does_not_count() -> None:
    fault = FAULT["loss jumps by 1 nat and stays"]
    late = injected.Fault(
        name="late", rule="loss_spike", within=2, needs=("loss",), change=fault.change
    )  # the median of nine steps moves with the fifth
    outcome = injected.try_out(late, records.curves()[:1], 2)
    assert (outcome.total, outcome.found) == (2, 0)


def test_the_made_up_scaler_is_one_of_a_healthy_run() -> None:
    scales = [moment.values["amp/scale"] for moment in records.scaled()[0].moments]
    assert scales[1:3] == [16384.0, 16384.0]
    assert min(scales) >= 128.0
    assert all(after in (before, before / 2, 2 * before) for before, after in itertools.pairwise(scales))


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
    "traces": [{"trace": "AR", "ranks": 4, "stages": 2, "steps": 44, "slow": [0], "alerts": []}],
}  # fmt: skip


def test_precision_and_recall_of_a_rule_are_those_of_its_own_faults_and_runs() -> None:
    found = detection_report.summaries(RESULTS)["loss_spike"]
    assert (found.steps, found.alerts, found.found, found.total) == (1000, 1, 3, 4)
    assert (found.precision, found.recall) == (0.75, 0.75)
    assert (found.tested_steps, found.tested_false) == (0, 0)  # its thresholds were chosen on such curves
    [straggler] = [one for rule, one in detection_report.summaries(RESULTS).items() if rule == "straggler"]
    assert (straggler.found, straggler.total) == (0, 1)


def test_steps_on_which_nothing_was_chosen_are_counted_for_themselves(tmp_path: Path) -> None:
    tested = {
        "run": "c", "family": records.MLPERF, "kind": "mlperf", "steps": 20, "series": ["loss"],
        "alerts": [{"rule": "loss_spike", "severity": "warning", "first_step": 7, "message": "up"}],
    }  # fmt: skip
    results = RESULTS | {"healthy": [*RESULTS["healthy"], tested]}
    found = detection_report.summaries(results)["loss_spike"]
    assert (found.steps, found.tested_steps, found.alerts, found.tested_false) == (1020, 20, 2, 1)
    text = detection_report.sections(results, tmp_path)["rules"]
    assert "| `loss_spike` | 1,000 | 1 | 20 | 1 | 0.600 (3/5) | 0.750 (3/4) |" in text
    assert "The healthy runs have 1,520 steps together." in text


def test_missed_targets_are_told_and_rules_that_are_not_there_are_not() -> None:
    met = {target: met for target, _, met in detection_report.targets(RESULTS)}
    assert met["at most one warning or critical per 100,000 healthy steps for every rule"] == "no"
    assert met["spikes of 0.5 nat that decay or stay: recall 0.95 within 10 steps"] == "no"
    assert met["the slowed worker of trace AR is found"] == "no"
    assert met["gradient alert at least 3 iterations before the loss on BLOOM-176B"] == "not yet"


def test_every_rule_of_the_catalogue_has_a_row_whether_there_is_data_or_not(tmp_path: Path) -> None:
    text = detection_report.sections(RESULTS, tmp_path)["rules"]
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if line.startswith("| `")}
    assert set(rows) == {rule.id for rule in all_rules()}
    assert "0.750 (3/4)" in rows["loss_spike"]
    assert "no labeled data: tested on synthetic series" in rows["host_memory_leak"]
    assert "not yet seen on a card" in rows["xid"]


def test_alerts_in_healthy_runs_are_told_one_by_one_and_once(tmp_path: Path) -> None:
    again = RESULTS["healthy"][0] | {"kind": "scaled"}
    text = detection_report.sections(RESULTS | {"healthy": [*RESULTS["healthy"], again]}, tmp_path)["healthy"]
    assert text.count("- `loss_spike` (warning)") == 1
    assert "- `loss_spike` (warning) in step 7 of a: up | down\n" in text
    assert "- `loss_spike` (info) in step 9 of a: a remark\n" in text


def test_the_faults_of_the_demo_are_a_matrix_of_faults_and_verdicts(tmp_path: Path) -> None:
    assert detection_report.sections(RESULTS, tmp_path)["demo"] == "Not measured yet."
    rows = [
        {
            "fault": "nan",
            "verdict": "nonfinite_loss",
            "alert": "nonfinite_loss",
            "steps_to_alert": 0,
            "seconds_to_alert": 1.25,
        },
        {"fault": "sync", "verdict": "healthy", "alert": None, "steps_to_alert": None, "seconds_to_alert": None},
        {
            "fault": "killed",
            "verdict": "lost_contact",
            "alert": "lost_contact",
            "steps_to_alert": 3,
            "seconds_to_alert": 30.0,
        },
    ]
    (tmp_path / "demo_faults.json").write_text(json.dumps(rows))
    lines = detection_report.sections(RESULTS, tmp_path)["demo"].splitlines()
    assert lines[0] == "2 of 3 runs ended in the right verdict; wrong ones are bold."
    assert "| fault | `nonfinite_loss` | `healthy` | `lost_contact` |" in lines
    assert "| sync |  | **1** |  |" in lines
    assert "| killed |  |  | 1 |" in lines
    assert "| nan | `nonfinite_loss` | 0 | 1.25 |" in lines


def test_sick_programs_are_told_with_how_many_were_right_at_once(tmp_path: Path) -> None:
    assert detection_report.sections(RESULTS, tmp_path)["programs"] == "Not measured yet."
    rows: list[dict[str, Any]] = [
        {"program": "01_tagger", "expected": "data_bound", "verdict": "data_bound", "right_at_first_try": True},
        {"program": "02_ranker", "expected": "data_bound", "verdict": "healthy", "right_at_first_try": False},
        {"program": "11_parser", "expected": "data_bound|hang", "verdict": "data_bound", "right_at_first_try": False},
        {"program": "healthy_01", "expected": "healthy", "verdict": "unmeasured_time", "right_at_first_try": True},
    ]
    rows = [row | {"illness": "no workers"} for row in rows]
    (tmp_path / "sick_programs.json").write_text(json.dumps(rows))
    text = detection_report.sections(RESULTS, tmp_path)["programs"]
    assert text.startswith(
        "At the first try, 1 of 3 sick programs got a right verdict; of those written after the rules, 0 of 1 sick program. "
        "1 of 1 healthy program ended without a warning.\n\n|"
    )
    assert "| 02_ranker | no workers | `data_bound` |  | no | `healthy` |" in text
    assert "| 11_parser | no workers | `data_bound` or `hang` | yes | no | `data_bound` |" in text
    rows = [row | {"right_now": row["verdict"] != "healthy"} for row in rows]
    (tmp_path / "sick_programs.json").write_text(json.dumps(rows))
    text = detection_report.sections(RESULTS, tmp_path)["programs"]
    assert "In the newest run, 2 of 3 sick programs got a right verdict. 1 of 1 healthy program ended" in text
    assert "| 11_parser | no workers | `data_bound` or `hang` | yes | no | `data_bound` | yes |" in text


def test_the_handbook_tells_what_was_measured_of_a_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = {"loss_spike": detection_report.plain(detection_report.summaries(RESULTS), tmp_path)["loss_spike"]}
    monkeypatch.setattr(handbook, "MEASURED", tmp_path / "measured.json")
    handbook.MEASURED.write_text(json.dumps(figures))
    assert handbook.measured(LossSpike()) == (
        "precision 0.750 (3 of 4 alerts), recall 0.750 (3 of 4 faults, within 9 steps; median 4); 1 false alert; 1,000 "
        "healthy steps: thresholds were chosen with a look at them ([detection.md](detection.md))."
    )
    assert handbook.measured(Straggler()) == "no labeled data: tested on synthetic series."
    assert handbook.measured(Xid()).startswith("not yet seen on a card")


def test_the_handbook_tells_which_fault_of_the_demo_a_rule_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = {
        "fault": "straggler",
        "verdict": "straggler",
        "alert": "straggler",
        "steps_to_alert": 72,
        "seconds_to_alert": 16.22,
    }
    missed = {"fault": "sync", "verdict": "healthy", "alert": "xid", "steps_to_alert": 1, "seconds_to_alert": 1.0}
    (tmp_path / "demo_faults.json").write_text(json.dumps([run, missed]))
    monkeypatch.setattr(handbook, "MEASURED", tmp_path / "measured.json")
    handbook.MEASURED.write_text(json.dumps(detection_report.plain({}, tmp_path)))
    named = "named in the demo (`straggler`: after 72 steps, 16.2 s)"
    assert handbook.measured(Straggler()) == f"{named}; no labeled data: tested on synthetic series."
    assert handbook.measured(Xid()).startswith("not yet seen on a card")
    assert named in detection_report.sections(RESULTS, tmp_path)["rules"]


def test_the_usual_remedy_stands_first_and_every_other_with_its_cause() -> None:
    text = handbook.handbook()
    for rule in all_rules():
        assert f"**What to do:** {rule.english.remedies['']}\n" in text, rule.id
    assert "- *:*" not in text


def test_every_section_of_a_rule_tells_what_was_measured() -> None:
    text = handbook.handbook()
    assert text.count("**Measured:** ") == len(all_rules())
