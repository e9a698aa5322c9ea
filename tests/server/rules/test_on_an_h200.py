"""Jobs recorded on a real GPU: what the rules make of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perfagent_server.backtest.replay import BacktestAlert, replay
from perfagent_server.rules.catalogue import rules_for
from perfagent_server.rules.plan import Plan

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / "detection")]

from gpu_jobs import moments_of  # noqa: E402


def alerts(job: str) -> dict[str, BacktestAlert]:
    judged = replay(moments_of(job), Plan(rules_for()))
    assert not judged.failed
    return {alert.rule: alert for alert in judged.alerts}


def test_a_healthy_transformer_raises_nothing() -> None:
    assert alerts("transformer") == {}


@pytest.mark.parametrize(
    ("job", "rule", "by_step", "said"),
    [
        ("copies", "h2d_bound", 100, "Copies to the device take"),
        ("reads", "sync_bound", 1000, "reads values of the GPU 256 times per step"),
        ("loader", "data_bound", 50, "for its batch"),
        ("splinters", "gpu_fragmentation", 380, "14 times the 5.89 GiB"),
        ("leak", "gpu_memory_leak", 112 + 300, "17.9 MiB per step"),  # 300 MB were added by step 112
        ("out_of_memory", "oom_observed", 21, "GPU memory ran out"),
    ],
)
def test_each_job_is_diagnosed(job: str, rule: str, by_step: int, said: str) -> None:
    found = alerts(job)
    assert found[rule].first_step <= by_step
    assert said in found[rule].message
