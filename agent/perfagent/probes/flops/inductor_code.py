"""Reads the code that inductor wrote in this process."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["causal_in_compiled_code", "products_in_own_kernels"]

_TEMPLATE = re.compile(r"^(triton_tem|cutlass|cutedsl|nv_universal_gemm|rocm)_\w* = async_compile\.", re.MULTILINE)
_CAUSAL = re.compile(
    r"_scaled_dot_product_(?:flash|efficient|cudnn)_attention(?:_for_cpu)?\.default\(.*, [\d.e-]+, (True|False)"
)
"""The argument that says whether attention is causal follows the dropout."""


def causal_in_compiled_code() -> bool | None:
    """True or False if all fused attention in inductor's code is causal or none is; None if there is none,
    or it is mixed."""
    said = {causal for source in _written_by_inductor() for causal in _CAUSAL.findall(source)}
    return said == {"True"} if len(said) == 1 else None


def products_in_own_kernels() -> bool:
    """True if inductor wrote kernels of its own for matrix products, convolutions or attention (`max-autotune`,
    flex_attention), which torch does not record. Misses its C++ templates on the CPU, whose names do not show it."""
    return any(_TEMPLATE.search(source) for source in _written_by_inductor())


def _written_by_inductor() -> Iterator[str]:
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    for module in list(getattr(cache, "modules", [])):
        try:
            yield Path(module.__file__).read_text("utf-8")
        except (OSError, AttributeError, TypeError, ValueError):
            continue
