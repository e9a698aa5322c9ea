"""Memory that an operation takes inside itself, of which its fake version knows nothing.

Recurrent layers take most: on a CPU oneDNN keeps a workspace for the backward pass, several times the layer's output,
on CUDA cuDNN keeps a reserve. oneDNN is asked: the real operation runs over a few time steps, and its workspace grows
evenly with their number. Convolutions on a CPU: see convolutions.py. Losses that are reduced to one number keep the
memory of all numbers on a CPU: the result is the front of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from perfagent_loop.estimates.convolutions import ConvolutionScratch

__all__ = ["Scratch"]

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


class Scratch:
    """One for each simulation: it remembers what oneDNN answered."""

    def __init__(self) -> None:
        self._asked: dict[tuple[Any, ...], int] = {}
        self._convolutions = ConvolutionScratch()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    def bytes_within(self, func: Any, args: tuple[Any, ...], result: Any) -> int:
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
                real = [torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, Tensor) else one for one in args]
                real[0] = torch.zeros((steps, *args[0].shape[1:]), dtype=args[0].dtype)
                self._asked[key] = int(torch.ops.aten.mkldnn_rnn_layer(*real)[3].nbytes)
        return self._asked[key]


def _is_reduced(func: Any, args: tuple[Any, ...]) -> bool:
    place = _REDUCED[func][0]
    reduction = args[place] if len(args) > place else _MEAN
    return reduction != _NOT_REDUCED and args[0].device.type == "cpu"


def _numbers(args: tuple[Any, ...]) -> int:
    """Of the input and the target, brought to one shape."""
    return math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]


def _gates(inputs: Tensor, weight: Tensor, *others: Tensor) -> int:
    """The gates of every step, and the weights reordered. weight: (gates x hidden, in); inputs: (time, batch, in)."""
    gates: int = inputs.shape[0] * inputs.shape[1] * weight.shape[0] * inputs.element_size()
    return gates + sum(one.nbytes for one in (weight, *others))


def _reserve(args: tuple[Any, ...], output: Tensor) -> int:
    """cuDNN's reserve by its documentation, not measured: the gates and the cell of every step, layer and direction."""
    gates = {2: 4, 3: 3}.get(int(args[6]), 1)
    return int(output.nbytes * (gates + 2) * int(args[9]))


def _cudnn_gradients(
    inputs: Tensor, weights: list[Tensor], _stride: int, _buffer: Any, hx: Tensor, cx: Tensor | None, *_: Any
) -> Any:
    """Of the input, the states and the weights: each has the size of what it is the gradient of."""
    cell = torch.empty_like(cx) if cx is not None else inputs.new_empty(0)
    return torch.empty_like(inputs), torch.empty_like(hx), cell, [torch.empty_like(weight) for weight in weights]
