"""Which devices of a node are this process's."""

from __future__ import annotations

import pytest
from fake_nvml import FakeGpu, FakeNvml, FakeSlice

from perfagent.samplers.gpu.device import Gpu, slices
from perfagent.samplers.gpu.visible import visible, with_uuid

PLAIN = [FakeGpu(uuid=f"GPU-0000000{n}-aaaa") for n in range(4)]
FIRST, SECOND = FakeSlice("MIG-11111111", instance=1), FakeSlice("MIG-22222222", instance=5, compute=1)
DIVIDED = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", slices=[FIRST, SECOND])]


class Node:
    def __init__(self, boards: list[FakeGpu]) -> None:
        library = FakeNvml(*boards)
        self.found = [Gpu(library, index, board) for index, board in enumerate(boards)]
        self.parts = {gpu.index: slices(library, gpu) for gpu in self.found}

    def visible(self, chosen: str | None) -> list[str]:
        environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
        return [gpu.uuid for gpu in visible(self.found, environ, lambda gpu: self.parts[gpu.index])]

    def with_uuid(self, told: str) -> str | None:
        gpu = with_uuid(told, self.found, lambda gpu: self.parts[gpu.index])
        return None if gpu is None else gpu.uuid


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [0, 1, 2, 3]), (" 3 , 1", [3, 1]), ("GPU-00000003", [3]), ("GPU-00000002-aaaa,1", [2, 1]),
        ("1,-1,2", [1]), ("1,nonsense,2", [1]), ("", []), ("NoDevFiles", []),
    ],
)  # fmt: skip
def test_cuda_visible_devices_decides_which_are_ours(chosen: str | None, expected: list[int]) -> None:
    assert Node(PLAIN).visible(chosen) == [PLAIN[index].uuid for index in expected]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("MIG-22222222", [SECOND.uuid]), ("MIG-GPU-b/1/0", [FIRST.uuid]),
        ("MIG-GPU-b/5/1,MIG-GPU-b/9/0,0", [SECOND.uuid]),
        ("1", [FIRST.uuid]), (None, ["GPU-a", FIRST.uuid]),  # CUDA shows the first slice of a divided GPU
    ],
)  # fmt: skip
def test_slices_go_by_their_uuid_in_both_spellings(chosen: str | None, expected: list[str]) -> None:
    assert Node(DIVIDED).visible(chosen) == expected


def test_a_uuid_from_torch_finds_the_device_whatever_the_order() -> None:
    node = Node(PLAIN)
    assert node.with_uuid("00000002-aaaa") == node.with_uuid("GPU-00000002-AAAA") == PLAIN[2].uuid
    assert node.with_uuid("") is node.with_uuid("00000009") is None
