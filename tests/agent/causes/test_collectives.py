"""Which collective a rank called last in each process group, from torch's flight recorder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from builders import until
from process_groups import alone_in_group
from torch_versions import since_torch

from perfagent.causes.collectives import last_collectives

STANDS_S = 5.0


@pytest.fixture
def gloo() -> Iterator[None]:
    with alone_in_group():
        yield


@since_torch(2, 11, "gloo's collectives are not recorded")
def test_each_group_is_told_with_its_last_collectives(gloo):
    """Also one that was not used."""
    before = last_collectives()["groups"]
    assert [(one["group"], one["size"]) for one in before] == [("0", 1)]
    seen = before[0]["seq"]  # of earlier tests in this process: the recorder is never emptied
    dist.new_group([0], group_desc="unused")
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    # gloo's own thread writes that a collective is done, a moment after the call has returned
    first, second = until(lambda: (told := last_collectives()["groups"]) and not told[0]["waits"] and told)
    assert (first["group"], first["backend"], first["desc"]) == ("0", "gloo", "default_pg")
    assert [name for _, name in first["recent"]][-4:] == ["all_reduce"] * 3 + ["barrier"]
    assert first["recent"][-1][0] == first["seq"] > seen
    assert (second["backend"], second["seq"], second["size"]) == ("", 0, 1)


def test_a_training_that_stands_tells_its_collectives(train, gloo):
    """After its stacks; one that moves does not."""
    job = train()
    job.steps(2)
    for at_s, told in ((2, 0), (4, 0), (STANDS_S - 0.5, 0), (STANDS_S, 0), (STANDS_S + 0.5, 0), (STANDS_S + 1, 1)):
        job.progress.step_end = 10**9
        job.watch.clock = lambda at_s=at_s: 1.0 + at_s
        job.watch.poll()
        assert len(job.events("collectives")) == told
    (found,) = job.events("collectives")
    assert found["step"] == 2
    assert found["groups"][0]["group"] == "0"
