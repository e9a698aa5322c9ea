"""Which board of a node is this process's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeGpu, FakeNvml, FakeSlice
from kernel_trees import Machine

from perfagent.samplers.gpu import kernel_gpu
from perfagent.samplers.gpu.device import Gpu, slices
from perfagent.samplers.gpu.own import own_board

UUIDS = [f"GPU-0000000{n}-1111-2222-3333-444444444444" for n in range(4)]
FIRST, SECOND = FakeSlice("MIG-11111111", instance=1), FakeSlice("MIG-22222222", instance=5)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Properties of the devices by kind, as torch gives them; of a kind without devices nothing is initialized."""
    found: dict[str, list[Any]] = {"cuda": [], "xpu": []}

    def module(kind: str) -> SimpleNamespace:
        return SimpleNamespace(
            is_initialized=lambda: bool(found[kind]), get_device_properties=lambda ordinal: found[kind][ordinal]
        )

    def current() -> SimpleNamespace:
        return SimpleNamespace(type="xpu" if found["xpu"] else "cuda")

    accelerator = SimpleNamespace(current_accelerator=current)
    fake = SimpleNamespace(cuda=module("cuda"), xpu=module("xpu"), accelerator=accelerator, compile=None)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return found


def nvidia(*gpus: FakeGpu, ordinal: int = 0, chosen: str = "") -> str | None:
    library = FakeNvml(*gpus)
    found = [Gpu(library, index, board) for index, board in enumerate(gpus)]
    own = own_board(found, lambda gpu: slices(library, gpu), ordinal, {"CUDA_VISIBLE_DEVICES": chosen})  # type: ignore[arg-type]
    return None if own is None else own.uuid


def kernel(machine: Machine, ordinal: int = 0) -> str | None:
    own = own_board(kernel_gpu.boards(machine.sys), lambda _: [], ordinal, {})
    return None if own is None else own.pci


def test_uuid_from_torch_finds_the_board_whatever_the_order(torch: dict[str, list[Any]]) -> None:
    boards = [FakeGpu(uuid=uuid) for uuid in UUIDS]
    torch["cuda"] = [SimpleNamespace(uuid=UUIDS[2].removeprefix("GPU-")), SimpleNamespace(uuid=UUIDS[0].upper())]
    assert nvidia(*boards, chosen="3,1") == UUIDS[2]
    assert nvidia(*boards, ordinal=1) == UUIDS[0]
    torch["cuda"] = [SimpleNamespace(uuid="00000009-1111-2222-3333-444444444444")]
    assert nvidia(*boards) is nvidia(boards[0]) is None


def test_only_board_is_ours_where_torch_tells_nothing() -> None:
    assert nvidia(FakeGpu(uuid="GPU-a")) == "GPU-a"
    assert nvidia(FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")) is None
    assert nvidia(FakeGpu(uuid="GPU-a", slices=[FIRST])) == FIRST.uuid
    assert nvidia(FakeGpu(uuid="GPU-a", slices=[FIRST, SECOND])) is None


def test_environment_names_boards_and_slices(torch: dict[str, list[Any]]) -> None:
    boards = FakeGpu(uuid="GPU-aa"), FakeGpu(uuid="GPU-bb", slices=[FIRST, SECOND])
    assert nvidia(*boards, chosen="GPU-aa") == "GPU-aa"
    torch["cuda"] = [SimpleNamespace(uuid="bb")]  # the board's: it does not say which slice
    assert nvidia(*boards) is None
    assert nvidia(*boards, chosen="MIG-2222") == SECOND.uuid
    assert nvidia(boards[0], FakeGpu(uuid="GPU-bb", slices=[FIRST])) == FIRST.uuid


def test_amd_board_is_found_unless_it_is_partitioned(torch: dict[str, list[Any]], tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.mi300x("0000:0c:00.0", unique_id="a1b2c3d4e5f60718")
    machine.mi300x("0001:1c:00.0", unique_id="b1b2c3d4e5f60718")
    assert kernel(machine) is None
    torch["cuda"] = [SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1C, pci_device_id=0)]
    assert kernel(machine) == "0001:1c:00.0"
    # ROCm keeps the digits of the unique_id as text in the 16 bytes, which torch prints as numbers
    digits = b"A1B2C3D4E5F60718".hex()
    torch["cuda"] = [SimpleNamespace(uuid=f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}")]
    assert kernel(machine) == "0000:0c:00.0"
    machine.mi300x("0000:0d:00.0", partition="CPX")
    torch["cuda"] = [SimpleNamespace(pci_domain_id=0, pci_bus_id=0x0D, pci_device_id=0)]
    assert kernel(machine) is None


def test_intel_board_is_found_by_the_uuid_of_level_zero(torch: dict[str, list[Any]], tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.battlemage("0000:04:00.0")
    machine.battlemage("0102:b3:00.0")
    # vendor, device, revision, domain; bus, device, function; tile (compute-runtime: generateUuidFromPciBusInfo)
    torch["xpu"] = [SimpleNamespace(uuid=f"86800be2-0000-0201-b300-0000000000{tile}") for tile in ("00", "01")]
    assert kernel(machine) == "0102:b3:00.0"
    assert kernel(machine, 1) is None, "a tile shares the board's figures with the others"
