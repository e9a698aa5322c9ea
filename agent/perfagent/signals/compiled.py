"""What torch.compile has made in this process, and what the code that inductor wrote says of itself."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

__all__ = ["causal_in_compiled_code", "compiled", "products_in_own_kernels", "traces_backward"]


_LIBRARIES = ("bitsandbytes.backends.default.ops",)
"""These compile functions of their own when they are imported, used or not; of tensors alone: no module is called in one."""
_theirs: dict[str, frozenset[int]] = {}


def compiled() -> bool:
    """Whether torch.compile was asked for anything in this process that may call a module."""
    used = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    asked = [backend for backend in used.values() if backend is not None]  # None is what disabling it leaves
    return bool(asked) and not {id(backend) for backend in asked} <= _libraries_backends()


def _libraries_backends() -> frozenset[int]:
    """The ids of the backends with which libraries compile functions of their own: inductor has one for each function."""
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        if module is not None and name not in _theirs and not getattr(module.__spec__, "_initializing", False):
            functions = [one for one in vars(module).values() if isinstance(one, FunctionType)]
            try:
                _theirs[name] = frozenset(map(id, _backends_in(functions)))
            except AttributeError:  # another torch: then what the library compiled counts
                _theirs[name] = frozenset()
    return frozenset[int]().union(*(_theirs[name] for name in _LIBRARIES if name in _theirs))


def _backends_in(functions: list[FunctionType]) -> Iterator[Any]:
    """Of what torch.compile has made of functions that these call, or are: a wrapper holds it, and it its context."""
    dynamo: Any = sys.modules["torch._dynamo.eval_frame"]
    own: Any = sys.modules["torch"]._TorchCompileInductorWrapper
    held = [*functions, *(one for function in functions for one in _held(function) if isinstance(one, FunctionType))]
    for context in (one for function in held for one in _held(function)):
        if isinstance(context, dynamo._TorchDynamoContext):
            backend = dynamo.innermost_backend(context.callback)
            if isinstance(backend, own):  # any other is everybody's who asks for the compiler by that name
                yield backend


def _held(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell.cell_contents


def traces_backward() -> bool:
    """Whether backward passes are traced and compiled at this moment (compiled autograd)."""
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "compiled_autograd_enabled", False))


_FUSED = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?")
_TEMPLATE = re.compile(r"^(triton_tem|cutlass|cutedsl|nv_universal_gemm|rocm)_\w* = async_compile\.", re.MULTILINE)
_CAUSAL_AT = {"flash": 4, "efficient": 6, "cudnn": 6}
"""Which argument says whether attention is causal."""


def causal_in_compiled_code() -> bool | None:
    """Whether all fused attention in what inductor wrote is causal; None where there is none, or some is and some is not."""
    said: set[bool] = set()
    for source in _written_by_inductor():
        if "_scaled_dot_product_" in source:
            said |= _causal_calls(source)
    return said.pop() if len(said) == 1 else None


def products_in_own_kernels() -> bool:
    """Whether inductor wrote kernels of its own for matrix products, convolutions or attention (`max-autotune`, flex_attention):
    torch records nothing of those. Not told by their names are its C++ templates on the CPU."""
    return any(_TEMPLATE.search(source) for source in _written_by_inductor())


def _written_by_inductor() -> Iterator[str]:
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    for module in list(getattr(cache, "modules", [])):
        try:
            yield Path(module.__file__).read_text("utf-8")
        except (OSError, AttributeError, TypeError, ValueError):
            continue


def _causal_calls(source: str) -> set[bool]:
    """What the calls `torch.ops.aten._scaled_dot_product_..._attention.default(...)` of a module say about causality."""
    said = set()
    for node in ast.walk(ast.parse(source)):
        function = node.func if isinstance(node, ast.Call) else None
        named = function.value if isinstance(function, ast.Attribute) and function.attr == "default" else None
        match = _FUSED.fullmatch(named.attr) if isinstance(named, ast.Attribute) else None
        if match is not None and isinstance(node, ast.Call):
            place = _CAUSAL_AT[match[1]]
            argument = node.args[place] if len(node.args) > place else None
            said.add(isinstance(argument, ast.Constant) and argument.value is True)
    return said
