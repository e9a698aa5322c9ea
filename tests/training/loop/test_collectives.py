"""Collectives whose tensors are nobody else's when the call returns: a script may end right after them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from builders import free_port, job_environment
from preloaded import run

RANK = """
    import sys, time
    import torch, torch.distributed as dist
    from perfagent_loop import collectives
    collectives.MOST_S = 60.0  # a thread of gloo's may pause for longer than what a training waits for it
    from perfagent_loop.collectives import all_gather, all_reduce
    from perfagent_loop.collectives import Agreement, Ranks

    dist.init_process_group("gloo")
    held = 0
    for _ in range(500):
        mine, others = torch.ones(3), [torch.empty(3), torch.empty(3)]
        before = sys.getrefcount(mine), sys.getrefcount(others[0])
        all_reduce(mine)
        held += sys.getrefcount(mine) > before[0]
        all_gather(others, mine)
        held += sys.getrefcount(mine) > before[0]
        held += sys.getrefcount(others[0]) > before[1]
    assert mine.tolist() == others[0].tolist() == [2.0, 2.0, 2.0]
    low = torch.tensor(float(dist.get_rank()))
    all_reduce(low, dist.ReduceOp.MIN)
    assert low.item() == 0.0
    class Alone:  # what an Agreement needs to know of the ranks
        group = dist.group.WORLD
    agreement = Agreement(Alone)
    agreement.look(1, time.monotonic())
    numbers = agreement._numbers
    agreement._before += 1  # that name
    before = sys.getrefcount(numbers)
    del agreement  # its sum is still on its way, as where a script ends
    held += sys.getrefcount(numbers) > before - 1
    print(held)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.real
def test_no_thread_holds_a_tensor_when_the_collective_returns(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK), encoding="utf-8")
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = run([str(script)], tmp_path, [job_environment(tmp_path, RANK=str(rank), **job) for rank in range(2)])
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    assert [rank.stdout.strip() for rank in ranks] == ["0", "0"]
