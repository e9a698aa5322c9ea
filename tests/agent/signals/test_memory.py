from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from perfagent.signals.memory import allocator, measured
from perfagent.wire import CATALOGUE


def stats(allocated: int, reserved: int, **more: Any) -> dict[str, Any]:
    """As torch.cuda.memory_stats_as_nested_dict gives them (torch 2.13)."""
    size = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    return {
        "allocated_bytes": {"all": size | {"current": allocated, "peak": 2 * allocated}},
        "reserved_bytes": {"all": size | {"current": reserved, "peak": 2 * reserved}},
        "active_bytes": {"all": size | {"current": allocated + 1}},
        "inactive_split_bytes": {"all": size | {"current": 7}},
        "num_alloc_retries": 3,
        "num_ooms": 1,
        **more,
    }


def test_the_allocators_state_in_our_names() -> None:
    told = measured(stats(600, 1000), free_bytes=5000.0)
    assert told == {
        "cuda/allocated_bytes": 600.0,
        "cuda/reserved_bytes": 1000.0,
        "cuda/active_bytes": 601.0,
        "cuda/inactive_split_bytes": 7.0,
        "cuda/peak_allocated_bytes": 1200.0,
        "cuda/peak_reserved_bytes": 2000.0,
        "cuda/alloc_retries": 3.0,
        "cuda/ooms": 1.0,
        "cuda/fragmentation": pytest.approx(0.4),
        "cuda/headroom_bytes": 5400.0,
    }
    assert told.keys() - CATALOGUE.keys() == set()


def test_what_the_allocator_does_not_tell_is_absent_and_never_zero() -> None:
    assert measured({}, free_bytes=1.0) == {}
    assert "cuda/fragmentation" not in measured(stats(0, 0))
    assert "cuda/headroom_bytes" not in measured(stats(1, 2))


def test_an_allocator_of_another_library_that_counts_nothing_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Elsewhere:
        is_initialized = staticmethod(lambda: True)

        @staticmethod
        def memory_stats_as_nested_dict(device: int) -> dict[str, Any]:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch, "cuda", Elsewhere)
    assert allocator(0, free_bytes=1.0) == {}


@pytest.mark.parametrize(("share", "headroom"), [(1.0, 5400.0), (0.5, 4400.0), (0.05, 0.0)])
def test_a_process_that_may_use_a_part_of_the_device_has_the_rest_of_that_part(
    monkeypatch: pytest.MonkeyPatch, share: float, headroom: float
) -> None:
    import torch

    class Shared:
        is_initialized = staticmethod(lambda: True)
        memory_stats_as_nested_dict = staticmethod(lambda device: stats(600, 1000))
        get_per_process_memory_fraction = staticmethod(lambda device: share)
        get_device_properties = staticmethod(lambda device: SimpleNamespace(total_memory=10_000))

    assert set(vars(Shared)) - {"__module__", "__dict__", "__weakref__", "__doc__"} <= set(dir(torch.cuda)), (
        "as torch has them"
    )
    monkeypatch.setattr(torch, "cuda", Shared)
    assert allocator(0, free_bytes=5000.0)["cuda/headroom_bytes"] == headroom


def test_a_process_that_never_used_cuda_has_no_allocator_and_starts_none() -> None:
    import torch

    assert allocator(0) == {}
    assert not torch.cuda.is_initialized()
