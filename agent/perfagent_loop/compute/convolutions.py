"""cuDNN's search for the fastest convolution (`torch.backends.cudnn.benchmark`), where it helps, and why not elsewhere.

With it on, cuDNN times its algorithms for each new shape of a convolution, in the first step that has the shape: a gain
where the same shapes come again, a loss where each batch brings new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count, check_module

__all__ = ["ConvolutionChoice", "cudnn_benchmark"]

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


@dataclass(frozen=True, slots=True)
class ConvolutionChoice:
    """enabled: whether cuDNN searches now. why: the reason. change: what else would make them faster."""

    enabled: bool
    why: str
    change: str = ""


def cudnn_benchmark(model: nn.Module, *, same_shapes: bool, limit: int | None = None) -> ConvolutionChoice:
    """Turns cuDNN's search on where it helps this model, and off elsewhere; says which and why.

    same_shapes: batches have the same shape in every step (images of one size, drop_last=True). limit: how many
    algorithms are tried for a shape, 10 by default; 0 tries all. The setting holds for the process.

    Raises ConfigError where torch.use_deterministic_algorithms or cudnn.deterministic is on: a search picks what is
    fastest on the day, so that two runs may differ in their last bits.
    """
    check_module(model)
    check_count("limit", limit, "a number of algorithms to try, 0 for all", least=0, or_none=True)
    found = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
    choice = _choice(found, same_shapes)
    if choice.enabled and (torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic):
        raise ConfigError(
            "deterministic algorithms were asked for, and cuDNN's search may choose another one in each run; leave out "
            "cudnn_benchmark, or torch.use_deterministic_algorithms and torch.backends.cudnn.deterministic"
        )
    torch.backends.cudnn.benchmark = choice.enabled
    if choice.enabled and limit is not None:
        torch.backends.cudnn.benchmark_limit = limit
    return choice


def _choice(found: Sequence[nn.Module], same_shapes: bool) -> ConvolutionChoice:
    if not found:
        return ConvolutionChoice(False, "the model has no convolutions, and cuDNN searches for nothing else")
    on_gpu = [module for module in found if next(module.parameters()).is_cuda]
    if not on_gpu:
        return ConvolutionChoice(False, f"its {len(found)} convolutions are not on a GPU, where alone cuDNN computes")
    if not same_shapes:
        change = "resize images to few sizes, or sort them into buckets; leave out the short last batch"
        return ConvolutionChoice(False, "batches change their shape, and each new one would be searched for", change)
    # tensor cores read images with their channels last; from the usual layout they must be transposed first
    flat = [module for module in on_gpu if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)]
    usual = flat and not any(module.weight.is_contiguous(memory_format=torch.channels_last) for module in flat)
    change = "model.to(memory_format=torch.channels_last), and images too: tensor cores want it in half precision"
    return ConvolutionChoice(True, f"{len(on_gpu)} convolutions see the same shapes each time", change if usual else "")
