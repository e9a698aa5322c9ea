"""Memory that an operation takes inside itself, of which its fake version knows nothing.

Recurrent layers take most: on a CPU oneDNN keeps a workspace for the backward pass, several times the layer's output,
on CUDA cuDNN keeps a reserve. oneDNN is asked: the real operation runs over a few time steps, and its workspace grows
evenly with their number. Convolutions copy what they read into oneDNN's order, or compute by torch's own matrix of
columns; how much each takes was seen with torch.profiler (PyTorch 2.13, AVX-512). Losses that are reduced to one number
keep the memory of all numbers on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

__all__ = ["ConvolutionScratch", "Scratch"]

_ONEDNN = torch.ops.aten.mkldnn_rnn_layer.default
_ONEDNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_CUDNN = torch.ops.aten._cudnn_rnn.default
_CUDNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward.default
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_ATEN = torch.ops.aten
_REDUCED = {  # the loss -> which of its arguments is the reduction, and how much more it takes while it computes
    _ATEN.mse_loss.default: (2, 1),
    _ATEN.smooth_l1_loss.default: (2, 1),
    _ATEN.soft_margin_loss.default: (2, 0),
    _ATEN.binary_cross_entropy.default: (3, 0),
}
_NOT_REDUCED, _MEAN = 0, 1
_FEW = 16
Args: TypeAlias = tuple[Any, ...]


class Scratch:
    """One for each simulation: it remembers what oneDNN answered."""

    def __init__(self) -> None:
        self._asked: dict[Args, int] = {}
        self._convolutions = ConvolutionScratch()

    def run(self, func: Callable[..., Any], args: Args, kwargs: dict[str, Any]) -> Any:
        """Calls the operation. torch 2.11 to 2.13 have no fake version of cuDNN's backward pass."""
        if func is _CUDNN_BACKWARD and isinstance(args[0], FakeTensor):
            return _cudnn_gradients(*args)
        result = func(*args, **kwargs)  # and now the workspace that the real operation would return
        if func is _ONEDNN and isinstance(result[3], FakeTensor) and not result[3].numel():
            return (*result[:3], torch.empty(self._workspace(args), dtype=torch.uint8, device=result[3].device))
        if func is _CUDNN and isinstance(result[3], FakeTensor) and not result[3].numel() and args[12]:
            reserve = torch.empty(_reserve(args, result[0]), dtype=torch.uint8, device=result[3].device)
            # The fake version answers None for a buffer that it was not given; autograd must have a tensor to keep.
            buffer = result[4] if result[4] is not None else reserve.new_empty(0)
            return *result[:3], reserve, buffer
        if func in _REDUCED and _is_reduced(func, args) and isinstance(result, FakeTensor):
            return torch.empty(_numbers(args), dtype=result.dtype, device=result.device).as_strided((), ())
        return result

    def bytes_within(self, func: object, args: Args, result: Any) -> int:
        """What the operation allocates and frees before it ends: reordered weights, gates before non-linearities."""
        if func in (_ONEDNN, _ONEDNN_BACKWARD):
            return _gates(*args[:5])
        if func is _CONVOLUTION and args[0].device.type == "cpu":
            return self._convolutions.forward(args[0], args[1], args[3:9], result)
        if func is _CONVOLUTION_BACKWARD and args[0].device.type == "cpu":
            return self._convolutions.backward(args[0], args[1], args[2], args[4:10], args[10])
        if func in _REDUCED and _is_reduced(func, args):
            return _REDUCED[func][1] * _numbers(args) * int(args[0].element_size())
        return 0

    def _workspace(self, args: Args) -> int:
        steps = int(args[0].shape[0])
        if steps <= _FEW:
            return self._ask(args, steps)
        half, whole = self._ask(args, _FEW // 2), self._ask(args, _FEW)
        return whole + (whole - half) * (steps - _FEW) // (_FEW - _FEW // 2)

    def _ask(self, args: Args, steps: int) -> int:
        """Bytes of the workspace of so many time steps, of the real operation on zeros."""
        key = (steps, args[0].shape[1:], args[0].dtype, args[2].shape, args[7], *args[10:13])
        if key not in self._asked:
            with unset_fake_temporarily():
                real = [torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
                real[0] = torch.zeros((steps, *args[0].shape[1:]), dtype=args[0].dtype)
                self._asked[key] = int(torch.ops.aten.mkldnn_rnn_layer(*real)[3].nbytes)
        return self._asked[key]


def _is_reduced(func: Any, args: Args) -> bool:
    place = _REDUCED[func][0]
    reduction = args[place] if len(args) > place else _MEAN
    return reduction != _NOT_REDUCED and args[0].device.type == "cpu"


def _numbers(args: Args) -> int:
    """Of the input and the target, brought to one shape."""
    return math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]


def _gates(inputs: Tensor, weight: Tensor, *others: Tensor) -> int:
    """The gates of every step, and the weights reordered. weight: (gates x hidden, in); inputs: (time, batch, in)."""
    gates: int = inputs.shape[0] * inputs.shape[1] * weight.shape[0] * inputs.element_size()
    return gates + sum(one.nbytes for one in (weight, *others))


def _reserve(args: Args, output: Tensor) -> int:
    """cuDNN's reserve by its documentation, not measured: the gates and the cell of every step, layer and direction."""
    gates = {2: 4, 3: 3}.get(int(args[6]), 1)
    return int(output.nbytes * (gates + 2) * int(args[9]))


def _cudnn_gradients(
    inputs: Tensor, weights: list[Tensor], _stride: int, _buffer: object, hx: Tensor, cx: Tensor | None, *_: object
) -> Any:
    """Of the input, the states and the weights: each has the size of what it is the gradient of."""
    cell = torch.empty_like(cx) if cx is not None else inputs.new_empty(0)
    return torch.empty_like(inputs), torch.empty_like(hx), cell, [torch.empty_like(weight) for weight in weights]


_BLOCK = 8
_FEW_CHANNELS = 4
_BY_ONEDNN = ("Mkldnn", "MkldnnTranspose")


class _Options(NamedTuple):
    """Of aten::convolution, in its order."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class ConvolutionScratch:
    """Bytes of one call. Remembers which implementation torch takes for which sizes."""

    def __init__(self) -> None:
        self._backends: dict[Args, str] = {}

    def forward(self, inputs: Tensor, weight: Tensor, options: Args, output: Tensor) -> int:
        given = _Options(*options)
        backend = self._backend(inputs, weight, given)
        if backend in _BY_ONEDNN:
            return _reordered(inputs, weight, output, given)
        if not backend.startswith("Slow"):
            return 0
        columns = _columns(inputs, weight, output, given, backend)
        if backend == "Slow2d" and given.groups > 1:  # group after group, and the outputs put together at the end
            return max(output.nbytes, inputs.nbytes // given.groups + columns)
        return columns

    def backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor, options: Args, wanted: list[bool]) -> int:
        """wanted: the gradients of input, weight and bias."""
        given = _Options(*options)
        backend = self._backend(inputs, weight, given)
        if backend in _BY_ONEDNN:
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
