"""torch.compile, in place, with what each mode needs checked before the first step instead of in the middle of it.

The model keeps its type and the names of its parameters (`Module.compile`, not the wrapper that `torch.compile`
returns), so that checkpoints, DDP, FSDP2 and the agent see what they would have seen."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_choice, check_module
from perfagent_loop.fsdp import blocks_of
from perfagent_loop.strategies import device_of

__all__ = ["MODES", "CompileMode", "compile_in_place", "compile_model", "uncompile_model"]

logger = logging.getLogger("perfagent")

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MODES: tuple[CompileMode, ...] = get_args(CompileMode)
_GPU_ONLY = {
    "reduce-overhead": "it records CUDA graphs, which only a GPU has",
    "max-autotune": "it tries kernels of Triton and records CUDA graphs, which only a GPU has",
    "max-autotune-no-cudagraphs": "it tries kernels of Triton, which only a GPU runs",
}
Model = TypeVar("Model", bound=nn.Module)


def compile_model(
    model: Model,
    mode: CompileMode = "default",
    *,
    blocks: bool = False,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backend: str = "inductor",
) -> Model:
    """`torch.compile` in place: the model keeps its type and the names of its parameters. It is compiled at its first
    call.

    Call it after `checkpoint_activations`.

    Args:
        model: The model.
        mode: "default"; "reduce-overhead" records CUDA graphs and needs inputs of one shape and address; "max-autotune"
            tries kernels for minutes and records CUDA graphs; "max-autotune-no-cudagraphs".
        blocks: True compiles one of the model's repeated blocks, and uses its code for the others: a deep model
            compiles as fast as a shallow one.
        dynamic: True for inputs of changing shapes. None lets torch find out, which costs a second compilation.
        fullgraph: True raises an error if the code cannot become one graph.
        backend: A backend of torch.compile; "eager" and "aot_eager" need no compiler.

    Returns:
        The same model.

    Raises:
        ConfigError: The first step would fail, for example because a C++ compiler is missing.
    """
    _check(model, mode, backend)
    parts: list[nn.Module] = blocks_of(nn.ModuleList([model])) if blocks else [model]
    if not parts:
        raise ConfigError("blocks=True compiles the items of lists of like modules, and the model has none")
    device = device_of(model)
    if mode in _GPU_ONLY and device.type != "cuda":
        logger.warning("perfagent: mode %r compiles as 'default' on the %s: %s", mode, device.type, _GPU_ONLY[mode])
        mode = "default"
    options: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph, "backend": backend}
    if mode != "default":  # torch refuses a mode for backends other than its own
        options["mode"] = mode
    for part in parts:
        compile_in_place(part, **options)
    return model


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """`Module.compile`, which by itself compiles nothing of a module whose class is torch's own (nn.Sequential, say):
    torch leaves frames of its own files alone. It takes a frame of ours round such a module.

    options: of torch.compile."""
    if str(getattr(module.forward, "__module__", "")).startswith("torch.nn.modules."):
        whole: Any = module
        framed = lambda *args, **kwargs: whole._call_impl(*args, **kwargs)  # noqa: E731, PLW0108 - a frame of ours
        module._compiled_call_impl = torch.compile(framed, **options)
        return
    compile_module: Any = module.compile
    compile_module(**options)


def uncompile_model(model: nn.Module) -> None:
    """Has the model and all its parts run as written again; what was compiled is left to torch."""
    for module in model.modules():
        module._compiled_call_impl = None


def _check(model: Any, mode: Any, backend: str) -> None:
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        raise ConfigError("the model is what torch.compile returned; pass the model that torch.compile was given")
    check_module(model)
    check_choice("mode", mode, MODES)
    done = [name or "the model" for name, module in model.named_modules() if module._compiled_call_impl is not None]
    if done:
        raise ConfigError(f"{done[0]} is compiled already; call uncompile_model first to compile it in another way")
    if backend != "inductor":
        if mode != "default":
            raise ConfigError(f"mode={mode!r} belongs to the backend inductor, not to {backend!r}; leave one out")
        return
    _check_compiler(device_of(model))


def _check_compiler(device: torch.device) -> None:
    """What inductor needs to write machine code for this device."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("torch.compile writes Triton for a GPU: install the triton of your torch")
        if torch.cuda.get_device_capability(device) < (7, 0):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"Triton needs compute capability 7.0, and {name} is older; train without compile")
        return
    compiler = os.environ.get("CXX") or "g++"
    if device.type == "cpu" and not (shutil.which(compiler) or shutil.which("clang++") or shutil.which("c++")):
        raise ConfigError(f"there is no compiler ({compiler}): install g++, or say backend='aot_eager'")
