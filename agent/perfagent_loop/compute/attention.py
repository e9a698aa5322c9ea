"""`best_attention`: the kernel that a call of scaled_dot_product_attention will run, why, and what to change for a
better one.

The kernel is not guessed: where the tensors are, torch is asked by the function that its own dispatch uses
(`torch._fused_sdp_choice`), after what autocast will do to them. The reasons come from attention_rules.py. For a GPU
that is not here, `gpu=Gpu(capability=(9, 0))` answers by the rules alone.

Which length of sequence makes which kernel worthwhile is a matter of the machine: `perfagent bench attention` measures
it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perfagent.errors import ConfigError
from perfagent.wire.quantities import size
from perfagent_loop.compute.attention_mask import MaskMeaning, meaning_of
from perfagent_loop.compute.attention_rules import (
    AttentionCall,
    Gpu,
    Kernel,
    Obstacle,
    Switches,
    default_order,
    obstacles,
)

__all__ = ["AttentionChoice", "Gpu", "best_attention"]

_KERNELS: dict[int, Kernel] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", -1: "none"}
"""torch.nn.attention.SDPBackend by number."""
_FUSED: tuple[Kernel, ...] = ("cudnn", "flash", "efficient")


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """kernel: flash, efficient, cudnn (fused: scores are never written to memory), math (matrix products with all
    scores in memory), explicit (the same, in the model's own code), or none (torch will raise, or there is nothing to
    compute). why: the reason, in a sentence. change: what to do for a faster kernel or a smaller call; empty where
    there is nothing. score_bytes:
    memory of one matrix of scores, of which math keeps about two for the backward pass; 0 for fused kernels. obstacles:
    what keeps each kernel away that torch would have preferred. predicted: by the rules for another GPU, not by torch
    on this machine.
    """

    kernel: Kernel
    why: str
    change: str = ""
    score_bytes: int = 0
    obstacles: dict[str, tuple[Obstacle, ...]] = field(default_factory=dict)
    predicted: bool = False

    @property
    def fused(self) -> bool:
        return self.kernel in _FUSED

    def __str__(self) -> str:
        memory = f"; its scores take {size(self.score_bytes)}" if self.score_bytes else ""
        return f"{self.kernel}: {self.why}{memory}" + (f"; to change: {self.change}" if self.change else "")


def best_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    gqa: bool = False,
    weights: bool = False,
    gpu: Gpu | None = None,
) -> AttentionChoice:
    """The kernel for these tensors, in the autocast, grad mode and sdpa_kernel context in which it is asked.

    q, k, v: (batch, heads, length, width), as given to torch.nn.functional.scaled_dot_product_attention; tensors on the
    meta device will do with `gpu`. causal, mask, dropout, gqa: its is_causal, attn_mask, dropout_p and enable_gqa.
    weights: the model needs the attention weights themselves. gpu: answer for this GPU instead of the tensors' device.

    Nothing is computed but a look at the mask; on a GPU that look waits for it. Raises ConfigError for what torch would
    refuse.
    """
    _check(q, k, v, causal, mask, dropout)
    dtype = _autocast_dtype(q, gpu)
    call = _described(q, k, v, causal, mask, dropout, gqa, dtype, gpu)
    if len({*call.dtypes}) > 1:
        raise ConfigError(
            f"q, k and v differ in type ({', '.join(str(kind) for kind in call.dtypes)}), which torch refuses; bring them to "
            "one type, or run the forward pass in autocast"
        )
    switches = Switches.now()
    if 0 in (q.numel(), k.numel(), v.numel()):
        return AttentionChoice(
            "none", "there is nothing to compute: a sequence is empty", "leave out batches without tokens"
        )
    if weights:
        return AttentionChoice(
            "explicit",
            "attention weights are wanted, and no fused kernel ever has them in memory",
            "ask for them only when you look at them (need_weights=False in nn.MultiheadAttention, output_attentions=False)",
            call.score_bytes,
        )
    device = gpu or (Gpu.here(q.device) if q.is_cuda else None)
    order = default_order(call.device, device)
    found = {kernel: tuple(obstacles(kernel, call, device, switches)) for kernel in order}
    kernel: Kernel
    if gpu is None:
        kernel = _torch_s_choice(q, k, v, causal, mask, dropout, gqa, dtype)
        if kernel in _FUSED and found.get(kernel):
            found[kernel] = ()  # torch knows better than the rules
    else:
        kernel = next((candidate for candidate in order if not found[candidate]), "none")
    meaning = None if mask is None else meaning_of(mask)
    return _explained(kernel, call, order, found, meaning, device, predicted=gpu is not None)


def _explained(
    kernel: Kernel,
    call: AttentionCall,
    order: list[Kernel],
    found: dict[Kernel, tuple[Obstacle, ...]],
    meaning: MaskMeaning | None,
    gpu: Gpu | None,
    *,
    predicted: bool,
) -> AttentionChoice:
    before = order[: order.index(kernel)] if kernel in order else order
    kept_away = {name: found[name] for name in before if found[name] and name != "math"}
    first = next(iter(kept_away.values()), ())
    where = "the CPU" if call.device == "cpu" else gpu.said if gpu else call.device
    if kernel == "none":
        why = f"torch will raise: {'; '.join(obstacle.why for obstacles_of in found.values() for obstacle in obstacles_of)}"
    elif kernel == "math" and not first:
        why = f"torch has no fused kernel on {where}"
    elif first:
        why = f"{next(iter(kept_away))} cannot take the call: {'; '.join(obstacle.why for obstacle in first)}"
    else:
        why = f"it is the first that torch tries on {where}, and nothing in the call is in its way"
    changes = [obstacle.change for obstacle in first]
    hint = _mask_hint(kernel, call, meaning)
    if hint and call.mask is not None:
        changes = [hint, *(obstacle.change for obstacle in first if obstacle.why != "flash takes no mask")]
    return AttentionChoice(
        kernel,
        why,
        "; ".join(dict.fromkeys(changes)),
        0 if kernel in _FUSED else call.score_bytes,
        {str(name): reasons for name, reasons in kept_away.items()},
        predicted,
    )


def _mask_hint(kernel: Kernel, call: AttentionCall, meaning: MaskMeaning | None) -> str:
    """What says the same as the mask at less cost. Even the kernels that take one read it in full, once a head."""
    if meaning is None or call.mask_grad:
        return ""
    if meaning.kind == "full":
        return "leave the mask out: it hides nothing"
    if meaning.kind == "causal":
        return "say is_causal=True instead of the mask: half of the pairs are then never computed"
    if meaning.kind == "causal and padding" and meaning.right:
        return (
            "say is_causal=True and leave the mask out: padding is at the end, where no real token looks (its labels must be "
            "ignored, as they are)"
        )
    if meaning.kind in ("packed", "packed and causal"):
        said = ", ".join(str(length) for length in meaning.lengths[:4]) + (", ..." if len(meaning.lengths) > 4 else "")
        return (
            f"use perfagent.packed_attention(q, k, v, lengths=[{said}], causal={meaning.kind != 'packed'}): what the mask hides "
            "is then not computed"
        )
    if "padding" in meaning.kind:
        return "pack the samples instead of padding them (perfagent.pack), and use perfagent.packed_attention"
    if meaning.kind == "bias" and kernel != "flash":
        return "on a GPU, add the bias in torch.nn.attention.flex_attention, which stays fused"
    return ""


def _check(q: Any, k: Any, v: Any, causal: bool, mask: Any, dropout: float) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{name} must be a tensor of (batch, heads, length, width), not {type(tensor).__name__}")
        if tensor.dim() < 2 or not tensor.is_floating_point():
            raise ConfigError(
                f"{name} must hold numbers with a fraction, as (batch, heads, length, width), and is {tensor.dtype} of "
                f"{tuple(tensor.shape)}"
            )
    if not q.device == k.device == v.device:
        raise ConfigError(f"q, k and v are on {q.device}, {k.device} and {v.device}; bring them to one device")
    if q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"q is {q.shape[-1]} wide and k {k.shape[-1]}: their product does not exist; make them equal")
    if k.shape[-2] != v.shape[-2]:
        raise ConfigError(
            f"k has {k.shape[-2]} positions and v {v.shape[-2]}: each key needs its value; make them equal"
        )
    if mask is not None and causal:
        raise ConfigError(
            "mask and causal=True exclude each other in torch; put causality into the mask, or leave the mask out"
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise ConfigError(f"mask must be a tensor, boolean or added to the scores, not {type(mask).__name__}")
    if not 0.0 <= dropout <= 1.0:
        raise ConfigError(f"dropout is a probability, 0 to 1; got {dropout!r}")


def _autocast_dtype(q: Tensor, gpu: Gpu | None) -> torch.dtype | None:
    """The type that autocast brings query, key, value and an added mask to; None without autocast."""
    kind = "cuda" if gpu is not None else q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As autocast does it: numbers with a fraction, save those of double precision."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


def _described(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | None,
    dropout: float,
    gqa: bool,
    dtype: torch.dtype | None,
    gpu: Gpu | None,
) -> AttentionCall:
    def kind(tensor: Tensor) -> torch.dtype:
        return tensor.dtype if dtype is None or tensor.dtype == torch.float64 else dtype

    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    return AttentionCall(
        query=tuple(q.shape),
        key=tuple(k.shape),
        value=tuple(v.shape),
        dtypes=(kind(q), kind(k), kind(v)),
        device="cuda" if gpu is not None else q.device.type,
        causal=causal,
        dropout=dropout,
        gqa=gqa,
        grad=wanted,
        mask=None if mask is None else tuple(mask.shape),
        mask_stride=1 if mask is None or not mask.dim() else mask.stride(-1),
        mask_grad=mask is not None and mask.requires_grad,
        last_strides=(q.stride(-1), k.stride(-1), v.stride(-1)),
        offsets=(int(q.storage_offset()), int(k.storage_offset()), int(v.storage_offset())),
    )


def _torch_s_choice(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, dropout: float, gqa: bool, dtype: torch.dtype | None
) -> Kernel:  # fmt: skip
    if q.device.type not in ("cpu", "cuda"):
        return "math"
    choose: Any = torch._fused_sdp_choice
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each condition when nothing is left, which `why` says
        try:
            number = choose(
                _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), None if mask is None else _cast(mask, dtype), dropout, causal,
                enable_gqa=gqa,
            )  # fmt: skip
        except RuntimeError:
            return "none"
    return _KERNELS.get(int(number), "math")
