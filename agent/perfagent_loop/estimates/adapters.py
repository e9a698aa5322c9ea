"""LoRA and quantized weights as they occupy memory: stand-ins put into a copy of the model, which is then simulated.

LoRA (Hu et al., 2021): W stays as it is, B·A of a small rank is trained. Quantized weights (QLoRA, Dettmers et al.,
2023) lie in memory in 8 or 4 bits with their scales; a layer expands its own while it computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_choice, check_count

__all__ = ["QUANTIZATIONS", "Quantization", "add_lora", "checked_adapters", "quantized_bytes"]

Quantization = Literal["int8", "nf4"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)


def checked_adapters(lora: Any, quantize: Any) -> None:
    """Raises ConfigError for a rank or a quantization that does not exist, or one without the other."""
    check_count("lora", lora, "the rank of the adapters", or_none=True)
    check_choice("quantize", quantize, QUANTIZATIONS, or_none=True)
    if quantize is not None and lora is None:
        raise ConfigError(f"quantize={quantize!r} keeps weights that cannot be trained themselves; add lora=8 (a rank)")


def quantized_bytes(count: int, rows: int, kind: Quantization) -> int:
    """Bytes of a quantized matrix. int8: one each and a float32 scale a row. nf4: half of one, a byte of scale for each
    block of 64, and a float32 for each 256 of those (QLoRA's double quantization: 0.127 bits a weight)."""
    if kind == "int8":
        return count + 4 * rows
    blocks = -(-count // 64)
    return -(-count // 2) + blocks + 4 * -(-blocks // 256)


def add_lora(
    model: nn.Module, rank: int, targets: Sequence[str] | None, quantize: Quantization | None, account: Any
) -> list[str]:
    """Freezes a model (a copy) and puts adapters beside its linear layers; answers their names.

    targets: the last part of their names; all linear layers but the output layer when None, as peft's "all-linear".
    account: keeps the books of what is made."""
    chosen = [*_chosen(model, targets)]
    if not chosen:
        raise ConfigError(f"no linear layer ends in {', '.join(targets or ())}; {_said(model)}")
    model.requires_grad_(False)
    for name, layer in chosen:
        with account.making("weights"):
            adapted = _Adapted(layer, rank, quantize)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, adapted)
    return [name for name, _ in chosen]


def _linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    named = model.named_modules()
    return [(name, one) for name, one in named if name and (type(one) is nn.Linear or type(one).__name__ == "Conv1D")]


def _chosen(model: nn.Module, targets: Sequence[str] | None) -> Iterator[tuple[str, nn.Module]]:
    found = _linears(model)
    if targets is None:
        if len(found) < 2:
            raise ConfigError(f"lora goes beside the linear layers in front of the output layer; {_said(model)}")
        yield from found[:-1]
        return
    for name, module in found:
        if name.rpartition(".")[2] in targets or name in targets:
            yield name, module


def _said(model: nn.Module) -> str:
    names = sorted({name.rpartition(".")[2] for name, _ in _linears(model)})
    return f"the linear layers of {type(model).__name__} are called {', '.join(names) or 'nothing: it has none'}"


class _Adapted(nn.Module):
    """A frozen linear layer, quantized or not, with B·A beside it. The attributes that others read of a layer stay."""

    def __init__(self, layer: Any, rank: int, quantize: Quantization | None) -> None:
        super().__init__()
        weight: Tensor = layer.weight
        across = type(layer).__name__ == "Conv1D"  # of transformers: (inputs, outputs)
        inputs, outputs = weight.shape if across else tuple(reversed(weight.shape))
        self.in_features, self.out_features, self._across = inputs, outputs, across
        self._shape, self._dtype = weight.shape, weight.dtype
        self.bias = layer.bias
        if quantize is None:
            self.weight: Tensor | None = layer.weight
        else:
            size = quantized_bytes(weight.numel(), weight.shape[0], quantize)
            self.weight = None
            packed = torch.empty(size, dtype=torch.uint8, device=weight.device)
            self.packed = nn.Parameter(packed, requires_grad=False)  # no buffer: those may change as a block runs
        # peft keeps adapters of quantized layers in float32
        dtype = weight.dtype if quantize is None else torch.float32
        self.a = nn.Parameter(torch.empty(rank, inputs, dtype=dtype, device=weight.device))
        self.b = nn.Parameter(torch.empty(outputs, rank, dtype=dtype, device=weight.device))

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else self._dtype
            base: Tensor = _Expanded.apply(x.to(dtype), self.packed, self._shape, self._across)  # type: ignore[no-untyped-call]
            base = base if self.bias is None else base + self.bias
        else:
            base = functional.linear(x, self.weight.t() if self._across else self.weight, self.bias)
        return base + functional.linear(functional.linear(x.to(self.a.dtype), self.a), self.b).to(base.dtype)


class _Expanded(torch.autograd.Function):
    """A product with a quantized matrix, which is expanded in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: torch.Size, across: bool) -> Tensor:
        ctx.shape, ctx.across, ctx.dtype, ctx.device = shape, across, x.dtype, packed.device
        weight = torch.empty(shape, dtype=x.dtype, device=packed.device)
        return x @ (weight if across else weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        weight = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        return gradients[0].to(ctx.dtype) @ (weight.t() if ctx.across else weight), None, None, None
