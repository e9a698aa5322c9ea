from __future__ import annotations

import pytest
from fake_nvml import FakeGpu, FakeNvml, FakeSlice

from perfagent.samplers.gpu.device import Gpu, slices
from perfagent.samplers.gpu.visible import visible, with_uuid


def node(*boards: FakeGpu) -> tuple[list[Gpu], dict[int, list[Gpu]]]:
    library = FakeNvml(*boards)
    found = [Gpu(library, index, board) for index, board in enumerate(boards)]
    return found, {gpu.index: slices(library, gpu) for gpu in found}


PLAIN = [FakeGpu(uuid=f"GPU-0000000{n}-aaaa") for n in range(4)]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 3 , 1", [3, 1]),
        ("GPU-00000003", [3]),
        ("GPU-00000002-aaaa,1", [2, 1]),
        ("1,-1,2", [1]),
        ("1,nonsense,2", [1]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_decides_which_are_ours(chosen: str | None, expected: list[int]) -> None:
    found, parts = node(*PLAIN)
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert [gpu.index for gpu in visible(found, environ, lambda gpu: parts[gpu.index])] == expected


def test_slices_go_by_their_uuid_in_both_spellings() -> None:
    first = FakeSlice("MIG-11111111", instance=1)
    second = FakeSlice("MIG-22222222", instance=5, compute=1)
    found, parts = node(FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", slices=[first, second]))

    def shown(chosen: str) -> list[str]:
        return [gpu.uuid for gpu in visible(found, {"CUDA_VISIBLE_DEVICES": chosen}, lambda gpu: parts[gpu.index])]

    assert shown("MIG-22222222") == ["MIG-22222222"]
    assert shown("MIG-GPU-b/1/0") == ["MIG-11111111"]
    assert shown("MIG-GPU-b/5/1,MIG-GPU-b/9/0,0") == ["MIG-22222222"]
    assert shown("1") == ["MIG-11111111"]  # CUDA shows the first slice of a divided GPU
    assert [gpu.uuid for gpu in visible(found, {}, lambda gpu: parts[gpu.index])] == ["GPU-a", "MIG-11111111"]


def test_a_uuid_from_torch_finds_the_device_whatever_the_order() -> None:
    found, parts = node(*PLAIN)
    for told in ("00000002-aaaa", "GPU-00000002-AAAA"):
        gpu = with_uuid(told, found, lambda gpu: parts[gpu.index])
        assert gpu is found[2]
    assert with_uuid("", found, lambda gpu: []) is None
    assert with_uuid("00000009", found, lambda gpu: []) is None


def test_a_boards_uuid_stands_for_its_slice_only_where_there_is_one() -> None:
    one, two = FakeSlice("MIG-1", 1), FakeSlice("MIG-2", 2)
    for parts_of_board, expected in (([one], "MIG-1"), ([one, two], None)):
        found, parts = node(FakeGpu(uuid="GPU-b", slices=parts_of_board))
        gpu = with_uuid("b", found, lambda gpu: parts[gpu.index])  # noqa: B023
        assert (gpu.uuid if gpu is not None else None) == expected
