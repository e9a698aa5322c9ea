"""Estimates the memory that a convolution on a CPU takes inside itself, in addition to its results.

oneDNN copies what it reads into an order of its own, and what it writes out of it. What it does not take (bfloat16 on
many processors) is computed by torch itself: the input once more for every place of the kernel, as one matrix. Which of
the two it is is asked of torch; how much each takes was seen with torch.profiler (PyTorch 2.13, AVX-512).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

__all__ = ["ConvolutionScratch"]

_BLOCK = 8
_FEW_CHANNELS = 4
_ONEDNN = ("Mkldnn", "MkldnnTranspose")


class _Options(NamedTuple):
    """Of aten::convolution, in its order."""

    stride: Any
    padding: Any
    dilation: Any
    transposed: bool
    output_padding: Any
    groups: int


class ConvolutionScratch:
    """Bytes of one call. Remembers which implementation torch takes for which sizes."""

    def __init__(self) -> None:
        self._backends: dict[tuple[Any, ...], str] = {}

    def forward(self, inputs: Tensor, weight: Tensor, options: Any, output: Tensor) -> int:
        given = _Options(*options)
        backend = self._backend(inputs, weight, given)
        if backend in _ONEDNN:
            return _reordered(inputs, weight, output, given)
        if not backend.startswith("Slow"):
            return 0
        columns = _columns(inputs, weight, output, given, backend)
        if backend == "Slow2d" and given.groups > 1:  # group after group, and the outputs put together at the end
            return max(output.nbytes, inputs.nbytes // given.groups + columns)
        return columns

    def backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor, options: Any, wanted: list[bool]) -> int:
        """wanted: the gradients of input, weight and bias."""
        given = _Options(*options)
        backend = self._backend(inputs, weight, given)
        if backend in _ONEDNN:
            return _in_order(gradient) + _reordered_backward(gradient, inputs, weight, given, wanted)
        if not backend.startswith("Slow"):
            return 0
        return _in_order(gradient) + self._by_columns(gradient, inputs, weight, given, backend, wanted)

    def _by_columns(
        self, gradient: Tensor, inputs: Tensor, weight: Tensor, given: _Options, backend: str, wanted: list[bool]
    ) -> int:
        columns = _columns(inputs, weight, gradient, given, backend)
        if backend == "SlowTranspose2d":
            columns //= inputs.shape[0]  # one sample after the other
        if backend == "Slow2d" and given.groups > 1:
            return max(inputs.nbytes, (inputs.nbytes + gradient.nbytes) // given.groups + columns)
        summed = wanted[2] and gradient.element_size() < 4 and not backend.startswith("SlowDilated")
        in_float32 = gradient.numel() * 4 if summed else 0  # for the bias
        return max(columns, in_float32)

    def _backend(self, inputs: Tensor, weight: Tensor, options: _Options) -> str:
        """Which implementation torch takes for these sizes and types. The tensors it looks at are never touched."""
        key = (inputs.shape, inputs.dtype, inputs.stride(), weight.shape, weight.dtype, tuple(map(str, options)))
        if key not in self._backends:
            with unset_fake_temporarily():
                real = [torch.empty_strided(one.size(), one.stride(), dtype=one.dtype) for one in (inputs, weight)]
                name = torch._C._select_conv_backend(*real, None, *options).name
            # torch forgot its name
            self._backends[key] = "MkldnnTranspose" if name == "???" and options.transposed else name
        return self._backends[key]


# ---- oneDNN's order


def _reordered(inputs: Tensor, weight: Tensor, output: Tensor, options: _Options) -> int:
    """First input, weight and output in oneDNN's order, then the output in both; beside the output itself."""
    if _last(inputs):
        return weight.nbytes
    read, written = _orders(inputs, output, options)
    return max(_copied(inputs, read) + weight.nbytes + written - output.nbytes, written * (1 + options.transposed))


def _reordered_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, options: _Options, wanted: list[bool]) -> int:
    """The gradient of the input comes first, written as a transposed convolution writes; then that of the weight, which
    needs two of the others in oneDNN's order."""
    if _last(inputs):
        return weight.nbytes
    if any(step > 1 for step in options.dilation) and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return inputs.nbytes if wanted[0] else 0  # without those instructions they are read and written as they lie
    of_inputs, of_gradient = _orders(inputs, gradient, options)
    read = of_gradient if not options.transposed else _copied(gradient, of_gradient)
    strided = not options.transposed and any(step > 1 for step in options.stride)
    first = max(read + weight.nbytes, of_inputs * (2 if strided else 1)) if wanted[0] else 0
    second = read + _copied(inputs, of_inputs) if wanted[1] else 0
    return max(first, second)


def _in_order(gradient: Tensor) -> int:
    """A gradient that was expanded or transposed is copied before anything else."""
    return 0 if gradient.is_contiguous() or _last(gradient) else gradient.nbytes


def _last(tensor: Tensor) -> bool:
    """Channels last: oneDNN computes in that order, and copies nothing."""
    return not tensor.is_contiguous() and tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _orders(inputs: Tensor, output: Tensor, options: _Options) -> tuple[int, int]:
    """Bytes of both in oneDNN's order: channels in blocks, but for the three or so of an image, where they are the side
    that a convolution reads (a transposed one is the same convolution backward)."""
    image, other = (output, inputs) if options.transposed else (inputs, output)
    few = 2 <= image.shape[1] <= _FEW_CHANNELS
    of_image, of_other = image.nbytes if few else _blocked(image), _blocked(other)
    return (of_other, of_image) if options.transposed else (of_image, of_other)


def _copied(tensor: Tensor, ordered: int) -> int:
    """What is read, in oneDNN's order; of few channels it reads what is there."""
    return ordered if tensor.shape[1] > _FEW_CHANNELS else 0


def _blocked(tensor: Tensor) -> int:
    channels = tensor.shape[1]
    return tensor.nbytes // max(1, channels) * (-(-channels // _BLOCK) * _BLOCK)


# ---- torch's own


def _columns(inputs: Tensor, weight: Tensor, output: Tensor, options: _Options, backend: str) -> int:
    """The matrix with a row for each place of the kernel: of one group, and of one sample where it is dilated."""
    kernel = weight.shape[2:]
    if options.transposed:  # the places are those of the input, the channels those of the output
        channels, places = output.shape[1], math.prod(inputs.shape[2:])
    else:
        channels, places = inputs.shape[1] // options.groups, math.prod(output.shape[2:])
    simple = math.prod(kernel) == 1 and not any(options.padding) and all(step == 1 for step in options.stride)
    if simple and backend == "Slow2d":  # the input is that matrix
        return 0
    samples = 1 if backend.startswith("SlowDilated") else inputs.shape[0]
    return samples * channels * math.prod(kernel) * places * inputs.element_size()
