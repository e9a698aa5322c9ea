"""Which collective a rank called last in each process group, from torch's flight recorder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import until
from process_groups import alone_in_group

from perfagent.rootcause import collectives, containment
from perfagent.rootcause.collectives import last_collectives
from perfagent.step.state import now


@pytest.fixture
def gloo() -> Iterator[None]:
    with alone_in_group():
        yield


def recorded(monkeypatch: pytest.MonkeyPatch, *dumps: Any) -> None:
    """Has the recorder say that: what it holds, or an exception."""

    def dump(said: Any) -> Any:
        def call() -> bytes:
            if isinstance(said, Exception):
                raise said
            return json.dumps(said).encode()

        return call

    monkeypatch.setattr(collectives, "_dumps", lambda _torch: map(dump, dumps))


def entry(number: int, name: str, group: str = "0", **more: Any) -> dict[str, Any]:
    found = {
        "collective_seq_id": number,
        "profiling_name": name,
        "process_group": [group, "default_pg"],
        "record_id": number - 1,
    }
    return {**found, "is_p2p": False, "retired": True, "state": "scheduled", **more}


def test_each_group_is_told_with_its_last_collectives_also_one_that_was_not_used(gloo):
    before = last_collectives()["groups"]
    assert [(one["group"], one["size"]) for one in before] == [("0", 1)]
    seen = before[0]["seq"]  # of earlier tests in this process: the recorder is never emptied
    dist.new_group([0], group_desc="unused")
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    # gloo's own thread writes that a collective is done, a moment after the call has returned
    groups = until(lambda: (told := last_collectives()["groups"]) and not told[0]["waits"] and told)
    first, second = groups
    assert (first["group"], first["backend"], first["desc"]) == ("0", "gloo", "default_pg")
    assert [name for _, name in first["recent"]][-4:] == ["all_reduce"] * 3 + ["barrier"]
    assert first["recent"][-1][0] == first["seq"] > seen
    assert (second["backend"], second["seq"], second["size"]) == ("", 0, 1)


def test_the_recorder_of_nccl_is_read_beside_the_general_one_and_numbers_are_kept_apart(gloo, monkeypatch):
    general = {"entries": [entry(1, "gloo:all_reduce"), entry(2, "gloo:barrier", retired=False)]}
    nccl = {
        "entries": [entry(7, "nccl:all_gather", state="completed", retired=False), entry(8, "nccl:send", is_p2p=True)]
    }
    recorded(monkeypatch, general, nccl)
    found = last_collectives()
    told = [(one["backend"], one["seq"], one["waits"], one["recent"][-1]) for one in found["groups"]]
    assert told == [("gloo", 2, True, [2, "barrier"]), ("nccl", 7, False, [7, "all_gather"])]
    assert not found["complete"], "the first six of NCCL are overwritten"


def test_where_the_recorder_is_missing_or_fails_nothing_is_told(gloo, monkeypatch):
    recorded(monkeypatch)
    assert last_collectives() == {"groups": [last_collectives()["groups"][0]], "complete": False}
    recorded(monkeypatch, RuntimeError("not today"))
    assert last_collectives() is None
    assert containment.problems.popitem()[1] == "RuntimeError: not today"


def test_without_process_groups_there_is_nothing_to_tell():
    assert last_collectives() == {}


def test_a_training_that_stands_is_asked_for_its_collectives_after_its_stacks_and_one_that_moves_is_not(train, gloo):
    job = train()
    job.steps(2)
    job.command("stacks", "s1")
    job.run._investigator.progress.step_end = now() - 60 * 10**9
    job.command("stacks", "s2")

    def told() -> list[dict[str, Any]]:
        job.run._investigator.poll()
        return job.events("collectives")

    (found,) = until(told)
    assert (found["command"], found["step"]) == ("s2", 2)
    assert found["groups"][0]["group"] == "0"
