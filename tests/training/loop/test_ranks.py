"""Two ranks over gloo: every strategy trains as one process with big batches, and what cannot work is refused on all
ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from big_batches import flat, net
from builders import free_port, job_environment
from preloaded import run

from perfagent.errors import CheckpointError

from . import ranks_job
from .ranks_job import checkpointed, sampled, train_sampled

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two ranks wrote, who found the checkpoint of one process there."""
    folder = tmp_path_factory.mktemp("ranks")
    loop = checkpointed(net(), folder / "of_one")
    assert train_sampled(loop, sampled(0, 1), steps=2) == [0, 1, 2, 3, 4, 5]
    loop.checkpoint.save_loop(loop)  # type: ignore[union-attr]
    torch.save(flat(loop.model), folder / "of_one.pt")
    variables = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
    }
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    [ended] = run([ranks_job.__file__, str(folder)], folder, [job_environment(folder, **variables)])
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.mark.parametrize("promise", ranks_job.PROMISES)
def test_two_ranks_keep_what_is_promised(folder: Path, promise: str) -> None:
    broken = [json.loads((folder / f"{rank}.json").read_text())[promise] for rank in (0, 1)]
    assert broken == ["", ""], "\n".join(broken)


def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(folder: Path) -> None:
    loop = checkpointed(net(), folder / "of_two")
    assert loop.resume() == 2
    assert torch.equal(flat(loop.model), torch.load(folder / "of_two.pt"))
    assert train_sampled(loop, sampled(0, 1), steps=3) == [12, 13, 14]
    short = checkpointed(net(), folder / "of_two")
    short.resume()
    own = [(torch.tensor(number), torch.zeros(1, 4)) for number in range(9)]  # of its own, as on each rank before
    assert train_sampled(short, own, steps=9) == []
    assert short.epoch == 1
    with pytest.raises(CheckpointError, match=r"wrap the model with perfagent\.fsdp"):
        checkpointed(net(), folder / "sharded").resume()
