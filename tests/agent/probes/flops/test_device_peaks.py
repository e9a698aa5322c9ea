"""The table of peaks: known devices by the names their drivers give them, and nothing for what is not known."""

from __future__ import annotations

import pytest

from perfagent.probes.flops.device_peaks import peak_flops

KNOWN = {
    ("NVIDIA H200", "bfloat16"): 989.4,
    ("NVIDIA H200 NVL", "bfloat16"): 835.5,
    ("NVIDIA H20", "bfloat16"): 148.0,
    ("NVIDIA A100 80GB PCIe", "tf32"): 156.0,
    ("A100-SXM4-40GB", "float32"): 19.5,
    ("Tesla V100-SXM2-32GB", "float16"): 125.0,
    ("NVIDIA L4", "bfloat16"): 121.0,
    ("NVIDIA L40S", "bfloat16"): 362.05,
    ("NVIDIA GeForce RTX 4090", "bfloat16"): 165.2,
    ("AMD Instinct MI300X", "bfloat16"): 1307.4,
}
UNKNOWN = (
    ("NVIDIA L400", "bfloat16"), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"), ("", "float32"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"), ("Tesla V100-SXM2-32GB", "bfloat16"),
)  # fmt: skip


def test_known_devices_have_the_peaks_of_their_sheets():
    assert {asked: peak_flops(*asked) for asked in KNOWN} == {asked: tflops * 1e12 for asked, tflops in KNOWN.items()}


@pytest.mark.parametrize(("device", "kind"), UNKNOWN)
def test_what_is_not_known_has_no_peak(device, kind):
    assert peak_flops(device, kind) is None
