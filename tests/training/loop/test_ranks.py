"""Two ranks over gloo: every strategy trains as one process with big batches, and what cannot work is refused on all
ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import free_port, job_environment
from preloaded import run

from perfagent.errors import CheckpointError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import ranks_job  # noqa: E402 - the data and the truth that the ranks train on

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
STRATEGIES = (
    "ddp", "ddp_stream", "ddp_checkpointed", "fsdp2", "fsdp2_items", "fsdp2_checkpointed", "zero1", "zero2_stream", "zero3",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def of_one(folder: Path) -> list[float]:
    """The weights in the checkpoint of one process, that the ranks find."""
    loop = ranks_job.checkpointed(ranks_job.net(), folder / "of_one")
    assert ranks_job.train_sampled(loop, ranks_job.sampled(0, 1), steps=2) == [0, 1, 2, 3, 4, 5]
    loop.checkpoint.save_loop(loop)  # type: ignore[union-attr]
    return ranks_job.flat(loop.model)


@pytest.fixture(scope="module")
def ranks(folder: Path, of_one: list[float]) -> list[dict[str, Any]]:
    """What each of the two ranks wrote."""
    environment = job_environment(
        folder, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), DS_ACCELERATOR="cpu"
    )
    [ended] = run([str(HERE / "ranks_job.py"), str(folder)], folder, [environment])
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def truth() -> dict[str, Any]:
    torch.set_num_threads(1)
    return ranks_job.big_batches([ranks_job.batches_of(0), ranks_job.batches_of(1)], ranks_job.STEPS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fifty_steps_are_those_of_one_process_with_big_batches(
    ranks: list[dict[str, Any]], truth: dict[str, Any], strategy: str
) -> None:
    for said in (rank["same_training"][strategy] for rank in ranks):
        assert len(said["norms"]) == ranks_job.STEPS
        assert said["weights"] == pytest.approx(truth["weights"], abs=1e-6)
        assert said["loss"] == pytest.approx(truth["loss"], abs=1e-6)
        assert said["norms"] == pytest.approx(truth["norms"], rel=1e-5)


def test_gradients_travel_once_a_window(ranks: list[dict[str, Any]]) -> None:
    units = 3  # two layers and the rest are shards of their own
    for said in ranks:
        assert said["reductions"] == {"ddp": 10, "fsdp2": 10 * units}


def test_last_windows_of_unequal_length_weigh_micro_steps_alike(ranks: list[dict[str, Any]]) -> None:
    model = ranks_job.net()
    optimizer = ranks_job.adamw(model)
    data = [ranks_job.batches_of(0), ranks_job.batches_of(1)[:7]]
    for _ in range(2):
        for begin in (0, 3, 6):
            window = [batch for of_rank in data for batch in of_rank[begin : begin + 3]]
            sum(ranks_job.loss_of(model, batch) for batch in window).div(len(window)).backward()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(model.parameters(), ranks_job.CLIP)
            optimizer.step()
            optimizer.zero_grad()
    for said in (rank["uneven_loaders"] for rank in ranks):
        assert said["steps"] == 6
        assert said["weights"] == pytest.approx(ranks_job.flat(model), abs=1e-6)
        assert "7, 6 batches" in said["refused"], "one rank would wait for the other"


REFUSED = {
    "refusals": {
        "bf16": "needs NCCL", "powersgd": "hangs", "not_ddp": "perfagent.fsdp", "zero_unequal": "2 and 3",
        "zero_unequal_ranks": "items=lambda batch", "static_and_unused": "exclude each other",
    },
    # what an engine decides otherwise
    "engine_options": {
        "precision": "bf16", "grad_accum": "gradient_accumulation_steps 2", "clip_norm": "gradient_clipping 1.0",
        "optimizer": "not the engine's",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_on_every_rank(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert [name for name, words in REFUSED[case].items() if words not in rank[case][name]] == []


def test_the_fp16_hook_works_over_gloo(ranks: list[dict[str, Any]], truth: dict[str, Any]) -> None:
    for said in ranks:
        assert float(said["refusals"]["fp16_trains"]) == pytest.approx(truth["norms"][3], rel=1e-2)


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: list[dict[str, Any]]) -> None:
    right = {"skipped": [True, False], "kept": True, "scale": 512.0, "moved": True}
    assert [said["skipping_together"] for said in ranks] == [{"ddp": right, "fsdp2": right}] * 2


def test_a_state_put_into_another_loop_goes_on_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    assert [said["going_on"] for said in ranks] == [{"ddp": True, "fsdp2": True}] * 2


def test_an_engine_in_bf16_steps_and_schedules_once_a_window(ranks: list[dict[str, Any]]) -> None:
    for said in (rank["engine_options"] for rank in ranks):
        assert said["steps"] == said["engine_steps"] == len(said["norms"]) == 4  # seven micro-steps, windows of two
        assert said["scheduled"] == 3  # counted from 0
        assert all(0.0 < norm < 100.0 for norm in said["norms"])
        assert said["own"] == [None, None]
    assert ranks[0]["engine_options"]["norms"] == ranks[1]["engine_options"]["norms"]


def test_ranks_split_alike_when_one_runs_out_of_memory(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["out_of_memory"] for rank in ranks)
    assert first["pieces"] == second["pieces"] == 4
    assert (first["gradients"], first["after"]) == (second["gradients"], second["after"])
    for said in (first, second):
        assert max(said["off"], said["off_by_items"]) < 1e-12
        assert said["stream_moved"]


def test_more_ranks_go_on_from_a_checkpoint_of_one(ranks: list[dict[str, Any]], of_one: list[float]) -> None:
    for rank, said in enumerate(one["other_ranks"] for one in ranks):
        assert said["step"] == 2
        assert said["weights"] == of_one
        assert said["seen"] == [6 + rank, 8 + rank, 10 + rank]
        assert "perfagent.ddp(model)" in said["fsdp2"]
    assert ranks[1]["other_ranks"]["own_numbers"]  # not those of rank 0


def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(ranks: list[dict[str, Any]], folder: Path) -> None:
    loop = ranks_job.checkpointed(ranks_job.net(), folder / "of_two")
    assert loop.resume() == 2
    assert ranks_job.flat(loop.model) == ranks[0]["other_ranks"]["of_two"]
    assert ranks_job.train_sampled(loop, ranks_job.sampled(0, 1), steps=3) == [12, 13, 14]
    short = ranks_job.checkpointed(ranks_job.net(), folder / "of_two")
    short.resume()
    own = [(torch.tensor(number), torch.zeros(1, 6)) for number in range(9)]  # of its own, as on each rank before
    assert ranks_job.train_sampled(short, own, steps=9) == []
    assert short.epoch == 1


def test_a_sharded_checkpoint_is_refused_by_a_whole_model(ranks: list[dict[str, Any]], folder: Path) -> None:
    assert ranks
    loop = ranks_job.checkpointed(ranks_job.net(), folder / "sharded")
    with pytest.raises(CheckpointError, match=r"wrap the model with perfagent\.fsdp"):
        loop.resume()
