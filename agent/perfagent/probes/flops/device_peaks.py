"""Lists how many floating-point operations per second a device can do at best, by its name and the dtype it multiplies in.

Dense figures at boost clock, in TFLOP/s, from the vendors' data sheets; where those print "with sparsity", half of it.
`float32` is for the ordinary cores; `tf32` is what torch uses for float32 where that is allowed. GeForce cards are listed
with 32-bit accumulation, which torch's kernels use, at half the rate that the sheets print for 16-bit accumulation.

Sources: NVIDIA data sheets of V100 (2020), T4 (2019), A100 (2021), A30, A10, A40, RTX A6000 (2021), H100 (2023, 2024
with NVL), H200 (2024), L4, L40 (2023), L40S (2023), RTX 6000 Ada (2023), HGX and GB200 NVL72 product pages (Blackwell:
one GPU of eight, of 72); NVIDIA architecture white papers of GA102 (2021), Ada (2022) and RTX Blackwell (2025),
appendix A; AMD Instinct MI300X and MI325X data sheets (2023, 2024). H20, H800 and A800 are published with their cuts. An
unpublished figure is absent, and so is a device that is not listed, or a slice of one (MIG).
"""

from __future__ import annotations

import functools
import re

__all__ = ["peak_flops"]

_HOPPER_SXM = {"float32": 66.9, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9}
_HOPPER_NVL = {"float32": 60.0, "tf32": 417.5, "float16": 835.5, "bfloat16": 835.5, "float8": 1670.5}
_A100 = {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}
_MI300X = {"float32": 163.4, "tf32": 653.7, "float16": 1307.4, "bfloat16": 1307.4, "float8": 2614.9}

_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"V100-PCIE.*", {"float32": 14.0, "float16": 112.0}),
    (r"V100-SXM[23].*", {"float32": 15.7, "float16": 125.0}),
    (r"V100S-PCIE.*", {"float32": 16.4, "float16": 130.0}),
    (r"T4", {"float32": 8.1, "float16": 65.0}),
    (r"A100\b.*|A800\b.*", _A100),
    (r"A30", {"float32": 10.3, "tf32": 82.0, "float16": 165.0, "bfloat16": 165.0}),
    (r"A10", {"float32": 31.2, "tf32": 62.5, "float16": 125.0, "bfloat16": 125.0}),
    (r"A40", {"float32": 37.4, "tf32": 74.8, "float16": 149.7, "bfloat16": 149.7}),
    (r"RTX A6000", {"float32": 38.7, "tf32": 77.4, "float16": 154.8, "bfloat16": 154.8}),
    (r"H100 PCIe", {"float32": 51.2, "tf32": 378.0, "float16": 756.0, "bfloat16": 756.0, "float8": 1513.0}),
    (r"H100 NVL|H200 NVL", _HOPPER_NVL),
    (r"H100( \d+GB HBM3)?|H200|GH200.*|H800", _HOPPER_SXM),
    (r"H20", {"float32": 44.0, "tf32": 74.0, "float16": 148.0, "bfloat16": 148.0, "float8": 296.0}),
    (r"L4", {"float32": 30.3, "tf32": 60.0, "float16": 121.0, "bfloat16": 121.0, "float8": 242.5}),
    (r"L40", {"float32": 90.5, "tf32": 90.5, "float16": 181.05, "bfloat16": 181.05, "float8": 362.0}),
    (r"L40S", {"float32": 91.6, "tf32": 183.0, "float16": 362.05, "bfloat16": 362.05, "float8": 733.0}),
    (
        r"RTX 6000 Ada Generation",
        {"float32": 91.1, "tf32": 182.1, "float16": 364.2, "bfloat16": 364.2, "float8": 728.5},
    ),
    (r"B200", {"float32": 75.0, "tf32": 1125.0, "float16": 2250.0, "bfloat16": 2250.0, "float8": 4500.0}),
    (r"GB200", {"float32": 80.0, "tf32": 1250.0, "float16": 2500.0, "bfloat16": 2500.0, "float8": 5000.0}),
    (r"GeForce RTX 3080", {"float32": 29.8, "tf32": 29.8, "float16": 59.5, "bfloat16": 59.5}),
    (r"GeForce RTX 3090", {"float32": 35.6, "tf32": 35.6, "float16": 71.0, "bfloat16": 71.0}),
    (r"GeForce RTX 3090 Ti", {"float32": 40.0, "tf32": 40.0, "float16": 80.0, "bfloat16": 80.0}),
    (r"GeForce RTX 4080", {"float32": 48.7, "tf32": 48.7, "float16": 97.5, "bfloat16": 97.5, "float8": 194.9}),
    (r"GeForce RTX 4090", {"float32": 82.6, "tf32": 82.6, "float16": 165.2, "bfloat16": 165.2, "float8": 330.3}),
    (r"GeForce RTX 5090", {"float32": 104.8, "tf32": 104.8, "float16": 209.5, "bfloat16": 209.5, "float8": 419.0}),
    (r"Instinct MI300X|Instinct MI325X", _MI300X),
)
_MAKERS = r"(NVIDIA |AMD |Tesla |NVIDIA Tesla )?"


@functools.cache
def peak_flops(device: str, kind: str) -> float | None:
    """Returns the dense peak of a device in FLOP/s; None if not known.

    device: its name as the driver gives it, such as "NVIDIA H100 80GB HBM3"; kind: float32, tf32, float16,
    bfloat16 or float8.
    """
    if "MIG " in device:
        return None
    for pattern, by_kind in _TFLOPS:
        if re.fullmatch(f"{_MAKERS}({pattern})", device.strip()):
            tflops = by_kind.get(kind)
            return None if tflops is None else tflops * 1e12
    return None
