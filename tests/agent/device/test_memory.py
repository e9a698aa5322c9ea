"""The state of CUDA's allocator, as a device would give it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfagent.device.memory import allocator, chosen_device, device_in_use, measured
from perfagent.wire import CATALOGUE


def stats(allocated: int, reserved: int) -> dict[str, Any]:
    """As torch.cuda.memory_stats_as_nested_dict gives them (torch 2.13)."""
    size = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    return {
        "allocated_bytes": {"all": size | {"current": allocated, "peak": 2 * allocated}},
        "reserved_bytes": {"all": size | {"current": reserved, "peak": 2 * reserved}},
        "active_bytes": {"all": size | {"current": allocated + 1}},
        "inactive_split_bytes": {"all": size | {"current": 7}},
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }


def cuda(monkeypatch: pytest.MonkeyPatch, told: dict[str, Any] | None, share: float = 1.0) -> None:
    """Stands for torch.cuda. told: by the allocator; None: it is another library's, which counts nothing."""
    answers = {
        "is_initialized": lambda: True,
        "get_per_process_memory_fraction": lambda device: share,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=10_000),
    }
    if told is not None:
        answers["memory_stats_as_nested_dict"] = lambda device: told
    assert set(answers) <= set(dir(torch.cuda)), "as torch has them"
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(**answers))


def test_the_allocators_state_has_our_names() -> None:
    told = measured(stats(600, 1000), free_bytes=5000.0)
    assert told == {
        "cuda/allocated_bytes": 600.0, "cuda/reserved_bytes": 1000.0, "cuda/active_bytes": 601.0,
        "cuda/inactive_split_bytes": 7.0, "cuda/peak_allocated_bytes": 1200.0, "cuda/peak_reserved_bytes": 2000.0,
        "cuda/alloc_retries": 3.0, "cuda/ooms": 1.0, "cuda/fragmentation": pytest.approx(0.4), "cuda/headroom_bytes": 5400.0,
    }  # fmt: skip
    assert told.keys() <= CATALOGUE.keys()


def test_what_the_allocator_does_not_tell_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured({}, free_bytes=1.0) == {}
    assert "cuda/fragmentation" not in measured(stats(0, 0))
    assert "cuda/headroom_bytes" not in measured(stats(1, 2))
    cuda(monkeypatch, None)
    assert allocator(0, free_bytes=1.0) == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert (allocator(0), device_in_use(), chosen_device(first=True)) == ({}, None, None), "it never used a device"


@pytest.mark.parametrize(("share", "headroom"), [(1.0, 5400.0), (0.5, 4400.0), (0.05, 0.0)])
def test_a_process_that_may_use_a_part_has_the_rest_of_it(
    monkeypatch: pytest.MonkeyPatch, share: float, headroom: float
) -> None:
    cuda(monkeypatch, stats(600, 1000), share)
    assert allocator(0, free_bytes=5000.0)["cuda/headroom_bytes"] == headroom
