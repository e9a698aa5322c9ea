"""Exposed communication: rank 1 is late by a known time, so rank 0 waits for that long, and that is `phase/comm_s`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from builders import free_port, job_environment
from preloaded import run

HERE = Path(__file__).parent
LATE_S = 0.2
SLACK_S = 0.04
EXCHANGES = ("ddp", "fsdp2", "by_hand", "by_hand_at_once")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("communication")
    port = str(free_port())
    environments = []
    for rank in (0, 1):
        environment = job_environment(
            folder / str(rank), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        )  # fmt: skip
        environments.append(environment)
    ended = run([str(HERE / "communication_job.py"), str(folder)], folder, environments)
    assert [one.returncode for one in ended] == [0, 0], ended
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def typical(said: dict[str, Any], kind: str) -> dict[str, float]:
    """The median of each phase over the steps in which the hooks were in: a preempted step is not the rule."""
    assert not said[kind]["with"]["failures"]
    steps = [values for step, values in said[kind]["with"]["rows"] if step > 1]
    for values in steps:
        phases = [seconds for name, seconds in values.items() if name.startswith("phase/")]
        assert sum(phases) == pytest.approx(values["step_time_s"], rel=1e-3), "no time counts twice"
        assert min(phases) >= 0.0
    return {name: median(values.get(name, 0.0) for values in steps) for name in steps[0]}


@pytest.mark.parametrize("kind", EXCHANGES)
def test_the_rank_that_waits_for_the_other_says_so(ranks, kind):
    values = typical(ranks[0], kind)
    assert values["phase/comm_s"] >= LATE_S - SLACK_S
    assert values["phase/backward_s"] < SLACK_S, "what was waited for is no backward time"
    assert values["phase/forward_s"] < SLACK_S


@pytest.mark.parametrize("kind", EXCHANGES)
def test_the_rank_that_is_late_computes_and_does_not_wait(ranks, kind):
    values = typical(ranks[1], kind)
    rows = ranks[1][kind]["with"]["rows"]
    # Where others use the cores too, the exchange itself takes longer, in some steps: a wait would be in all of them.
    assert min(row["phase/comm_s"] for step, row in rows if step > 1) < SLACK_S
    assert values["phase/backward_s"] >= LATE_S - SLACK_S


def test_without_an_exchange_there_is_next_to_nothing(ranks):
    assert all(typical(said, "ddp_without_exchange").get("phase/comm_s", 0.0) < 0.002 for said in ranks)


@pytest.mark.parametrize("kind", [*EXCHANGES, "ddp_without_exchange"])
def test_losses_are_bit_equal_with_and_without(ranks, kind):
    for said in ranks:
        assert said[kind]["with"]["losses"] == said[kind]["without"]["losses"]


def test_the_collectives_are_their_own_again_after_the_run(ranks):
    for said in ranks:
        for kind in EXCHANGES:
            assert said[kind]["with"]["watched"] == [True, True, True]
            assert said[kind]["with"]["restored"]


def test_a_single_process_is_left_alone(record):
    import torch
    import torch.distributed as dist

    inside = dist.all_reduce.__closure__[0]
    collective = inside.cell_contents
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert inside.cell_contents is collective
    assert not recorded.of("phase/comm_s")
