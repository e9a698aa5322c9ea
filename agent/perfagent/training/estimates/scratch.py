"""Memory that an operation takes inside itself, of which its fake version knows nothing.

Recurrent layers take most: on a CPU oneDNN keeps a workspace for the backward pass, several times the layer's output, on CUDA
cuDNN keeps a reserve. oneDNN is asked: the real operation runs over a few time steps, and its workspace grows evenly with their
number. Convolutions on a CPU copy what they read into oneDNN's order and what they write out of it; how much was seen with
torch.profiler (PyTorch 2.13, AVX-512).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

__all__ = ["Scratch"]

_ONEDNN = torch.ops.aten.mkldnn_rnn_layer.default
_ONEDNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_CUDNN = torch.ops.aten._cudnn_rnn.default
_CONVOLUTION = torch.ops.aten.convolution.default
_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_SLOW = ("Slow2d", "Slow3d")
_ONEDNN_CONVOLUTIONS = ("Mkldnn", "MkldnnTranspose")
_FEW = 16
_BLOCK = 8


class Scratch:
    """One for each simulation: it remembers what oneDNN answered."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Any, ...], int] = {}
        self._backends: dict[tuple[Any, ...], str] = {}

    def filled(self, func: Any, args: tuple[Any, ...], result: Any) -> Any:
        """The result with the workspace that the real operation would return; as it is where it has one."""
        if func is _ONEDNN and isinstance(result[3], FakeTensor) and not result[3].numel():
            return (*result[:3], torch.empty(self._workspace(args), dtype=torch.uint8, device=result[3].device))
        if func is _CUDNN and isinstance(result[3], FakeTensor) and not result[3].numel() and args[12]:
            return (*result[:3], torch.empty(_reserve(args, result[0]), dtype=torch.uint8, device=result[3].device), *result[4:])
        return result

    def bytes_within(self, func: Any, args: tuple[Any, ...], result: Any) -> int:
        """What the operation allocates and frees again before it ends: reordered weights, and gates before their
        non-linearity."""
        if func is _ONEDNN:
            return _gates(*args[:5])
        if func is _ONEDNN_BACKWARD:
            return _gates(*args[:5])
        if func is _CONVOLUTION and args[0].device.type == "cpu":
            return self._convolution(args, result)
        if func is _CONVOLUTION_BACKWARD and args[0].device.type == "cpu":
            return self._convolution_backward(*args)
        return 0

    def _convolution(self, args: tuple[Any, ...], output: Tensor) -> int:
        inputs, weight = args[:2]
        backend = self._backend((inputs, weight, *args[3:9]))
        if backend in _SLOW:
            return _columns(inputs, weight, output)
        return _reordered(inputs, weight, output) if backend in _ONEDNN_CONVOLUTIONS else 0

    def _convolution_backward(self, gradient: Tensor, inputs: Tensor, weight: Tensor, _bias: Any, *rest: Any) -> int:
        backend = self._backend((inputs, weight, *rest[:6]))
        if backend in _SLOW:
            return gradient.nbytes + _columns(inputs, weight, gradient)
        return _reordered_backward(gradient, inputs, weight, rest[6]) if backend in _ONEDNN_CONVOLUTIONS else 0

    def _backend(self, args: tuple[Any, ...]) -> str:
        """Which implementation torch takes for these sizes and types. The tensors it looks at are never touched."""
        inputs, weight, *options = args
        key = (inputs.shape, inputs.dtype, inputs.stride(), weight.shape, weight.dtype, tuple(map(str, options)))
        if key not in self._backends:
            with unset_fake_temporarily():
                real = [torch.empty_strided(one.size(), one.stride(), dtype=one.dtype) for one in (inputs, weight)]
                self._backends[key] = torch._C._select_conv_backend(*real, None, *options).name
        return self._backends[key]

    def _workspace(self, args: tuple[Any, ...]) -> int:
        steps = int(args[0].shape[0])
        if steps <= _FEW:
            return self._ask(args, steps)
        half, whole = self._ask(args, _FEW // 2), self._ask(args, _FEW)
        return whole + (whole - half) * (steps - _FEW) // (_FEW - _FEW // 2)

    def _ask(self, args: tuple[Any, ...], steps: int) -> int:
        """Bytes of the workspace of so many time steps, of the real operation on zeros."""
        key = (steps, args[0].shape[1:], args[0].dtype, args[2].shape, args[7], *args[10:13])
        if key not in self._asked:
            with unset_fake_temporarily():
                real = [_zeros(one) for one in args]
                real[0] = torch.zeros((steps, *args[0].shape[1:]), dtype=args[0].dtype)
                self._asked[key] = int(torch.ops.aten.mkldnn_rnn_layer(*real)[3].nbytes)
        return self._asked[key]


def _zeros(value: Any) -> Any:
    return torch.zeros(tuple(value.shape), dtype=value.dtype) if isinstance(value, Tensor) else value


def _columns(inputs: Tensor, weight: Tensor, output: Tensor) -> int:
    """The input once more for every place of the kernel, as one matrix: what torch does itself (bfloat16 on a CPU, say)."""
    return inputs.shape[0] * inputs.shape[1] * weight[0, 0].numel() * output[0, 0].numel() * inputs.element_size()


def _reordered(inputs: Tensor, weight: Tensor, output: Tensor) -> int:
    """First input, weight and output in oneDNN's order, then the output in both; beside the output itself."""
    if _last(inputs):
        return weight.nbytes
    copied = _blocked(inputs) if inputs.shape[1] % _BLOCK == 0 else 0  # of few channels it reads what is there
    return max(copied + weight.nbytes + _blocked(output) - output.nbytes, _blocked(output))


def _reordered_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, wanted: list[bool]) -> int:
    """The gradient of the input comes first, then that of the weight; each needs two of the others in oneDNN's order."""
    if _last(inputs):
        return weight.nbytes
    again = 0 if gradient.is_contiguous() else gradient.nbytes
    return again + _blocked(gradient) + (_blocked(inputs) if wanted[1] else weight.nbytes)


def _last(tensor: Tensor) -> bool:
    """Channels last: oneDNN computes in that order, and copies nothing."""
    return not tensor.is_contiguous() and tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _blocked(tensor: Tensor) -> int:
    """Bytes in oneDNN's order: channels in blocks, but for the three or so of an image."""
    channels = tensor.shape[1]
    whole = channels if 2 <= channels <= 4 else -(-channels // _BLOCK) * _BLOCK
    return tensor.nbytes // max(1, channels) * whole


def _gates(inputs: Tensor, weight: Tensor, *others: Tensor) -> int:
    """The gates of every step, and the weights reordered. weight: (gates x hidden, inputs); inputs: (time, batch, inputs)."""
    gates: int = inputs.shape[0] * inputs.shape[1] * weight.shape[0] * inputs.element_size()
    return gates + sum(one.nbytes for one in (weight, *others))


def _reserve(args: tuple[Any, ...], output: Tensor) -> int:
    """cuDNN's reserve: the gates and the cell of every step, layer and direction. From its documentation; not measured here."""
    gates = {2: 4, 3: 3}.get(int(args[6]), 1)
    return int(output.nbytes * (gates + 2) * int(args[9]))
