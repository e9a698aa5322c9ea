"""`best_attention`: which kernel a call of scaled_dot_product_attention will run, why, and what to change.

torch is asked by the function that its own dispatch uses (`torch._fused_sdp_choice`), after what autocast will do to
the tensors. The reasons come from attention_rules.py, and so does the answer for a GPU that is not here."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perfagent.errors import ConfigError
from perfagent.wire.quantities import size
from perfagent_loop.compute.attention_rules import AttentionCall, Gpu, Kernel, Obstacle, default_order, obstacles

__all__ = ["AttentionChoice", "Gpu", "MaskMeaning", "best_attention", "meaning_of"]

_KERNELS: dict[int, Kernel] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", -1: "none"}
"""torch.nn.attention.SDPBackend by number."""
_FUSED: tuple[Kernel, ...] = ("cudnn", "flash", "efficient")


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """kernel: flash, efficient, cudnn (fused: scores are never written to memory), math (matrix products with all
    scores in memory), explicit (the same, in the model's own code), or none (torch will raise, or there is nothing to
    compute). why: the reason, in a sentence. change: what to do for a faster kernel or a smaller call; empty where
    there is nothing. score_bytes: memory of one matrix of scores, of which math keeps about two for the backward pass;
    0 for fused kernels. obstacles: what keeps each kernel away that torch would have preferred. predicted: by the rules
    for another GPU, not by torch on this machine."""

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
    """Which kernel `scaled_dot_product_attention` runs for these tensors, why, and what to change for a faster one.

    The answer is for the autocast, grad mode and `sdpa_kernel` context in which it is called. On a GPU, reading a mask
    waits for the device.

    Args:
        q: The query, (batch, heads, length, width). Tensors on the meta device are enough if `gpu` is given.
        k: The key, of the same shape but for its length, and its heads with `gqa`.
        v: The value.
        causal: `is_causal` of the call.
        mask: `attn_mask` of the call.
        dropout: `dropout_p` of the call.
        gqa: `enable_gqa` of the call.
        weights: True if the model needs the attention weights.
        gpu: Answer for this GPU instead of the device of the tensors.

    Returns:
        The choice: `kernel` ("flash", "efficient", "cudnn", "math", "explicit" or "none"), `why`, `change`, and
            `score_bytes`, the memory of one matrix of scores (0 for fused kernels).

    Raises:
        ConfigError: torch would refuse these arguments.
    """
    _check(q, k, v, causal, mask, dropout)
    kind = "cuda" if gpu is not None else q.device.type
    dtype = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
    call = AttentionCall(q=q, k=k, v=v, causal=causal, mask=mask, dropout=dropout, gqa=gqa, dtype=dtype, device=kind)
    if len({*call.dtypes}) > 1:
        raise ConfigError(f"q, k and v are {', '.join(map(str, call.dtypes))}; bring them to one type, or autocast")
    if 0 in (q.numel(), k.numel(), v.numel()):
        why = "there is nothing to compute: a sequence is empty"
        return AttentionChoice("none", why, "leave out batches without tokens")
    if weights:
        why = "attention weights are wanted, and no fused kernel ever has them in memory"
        change = "ask for them only when you look at them (need_weights=False, output_attentions=False)"
        return AttentionChoice("explicit", why, change, call.score_bytes)
    device = gpu or (Gpu.here(q.device) if q.is_cuda else None)
    found = {kernel: obstacles(kernel, call, device) for kernel in default_order(device)}
    if gpu is None:
        kernel = _torch_s_choice(call)
        if kernel in _FUSED and found.get(kernel):
            found[kernel] = ()  # torch knows better than the rules
    else:
        kernel = next((candidate for candidate in found if not found[candidate]), "none")
    return _explained(kernel, call, found, device, predicted=gpu is not None)


def _explained(
    kernel: Kernel, call: AttentionCall, found: dict[Kernel, tuple[Obstacle, ...]], gpu: Gpu | None, *, predicted: bool
) -> AttentionChoice:
    before = itertools.takewhile(lambda name: name != kernel, found)
    kept_away = {str(name): found[name] for name in before if found[name] and name != "math"}
    first = next(iter(kept_away.values()), ())
    where = "the CPU" if call.device == "cpu" else gpu.said if gpu else call.device
    if kernel == "none":
        why = f"torch will raise: {'; '.join(obstacle.why for those in found.values() for obstacle in those)}"
    elif first:
        why = f"{next(iter(kept_away))} cannot take the call: {'; '.join(obstacle.why for obstacle in first)}"
    elif kernel == "math":
        why = f"torch has no fused kernel on {where}"
    else:
        why = f"it is the first that torch tries on {where}, and nothing in the call is in its way"
    changes = [obstacle.change for obstacle in first]
    hint = "" if call.mask is None else _mask_hint(kernel, meaning_of(call.mask), learned=call.mask.requires_grad)
    if hint:
        changes = [hint, *(obstacle.change for obstacle in first if obstacle.why != "flash takes no mask")]
    scores = 0 if kernel in _FUSED else call.score_bytes
    return AttentionChoice(kernel, why, "; ".join(dict.fromkeys(changes)), scores, kept_away, predicted)


def _mask_hint(kernel: Kernel, meaning: MaskMeaning, *, learned: bool) -> str:
    """What says the same as the mask at less cost. Even the kernels that take one read it in full, once a head."""
    if learned:
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
        said = ", ".join(map(str, meaning.lengths[:4])) + (", ..." if len(meaning.lengths) > 4 else "")
        return (
            f"use perfagent.packed_attention(q, k, v, lengths=[{said}], causal={meaning.kind != 'packed'}): what the mask hides "
            "is then not computed"
        )
    if "padding" in meaning.kind:
        return "pack the samples instead of padding them (perfagent.pack), and use perfagent.packed_attention"
    if meaning.kind == "bias" and kernel != "flash":
        return "on a GPU, add the bias in torch.nn.attention.flex_attention, which stays fused"
    return ""


def _check(q: object, k: object, v: object, causal: bool, mask: object, dropout: float) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or not tensor.is_floating_point():
            given = f"{tensor.dtype} of {[*tensor.shape]}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(f"{name} must be floating-point numbers (batch, heads, length, width), not {given}")
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)  # noqa: PT018
    if not q.device == k.device == v.device:
        raise ConfigError(f"q, k and v are on {q.device}, {k.device} and {v.device}; bring them to one device")
    if q.shape[-1] != k.shape[-1]:
        raise ConfigError(f"q is {q.shape[-1]} wide and k {k.shape[-1]}: their product does not exist; make them equal")
    if k.shape[-2] != v.shape[-2]:
        raise ConfigError(f"k has {k.shape[-2]} positions and v {v.shape[-2]}: each key needs its value")
    if mask is not None and causal:
        raise ConfigError("mask and causal=True exclude each other in torch; put causality into the mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise ConfigError(f"mask must be a tensor, boolean or added to the scores, not {type(mask).__name__}")
    if not 0.0 <= dropout <= 1.0:
        raise ConfigError(f"dropout is a probability, 0 to 1; got {dropout!r}")


def _torch_s_choice(call: AttentionCall) -> Kernel:
    if call.device not in ("cpu", "cuda"):
        return "math"
    q, k, v = (_cast(tensor, call.dtype) for tensor in call.tensors)
    mask = None if call.mask is None else _cast(call.mask, call.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each condition when nothing is left, which `why` says
        try:
            number = torch._fused_sdp_choice(q, k, v, mask, call.dropout, call.causal, enable_gqa=call.gqa)
        except RuntimeError:
            return "none"
    return _KERNELS.get(int(number), "math")


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As autocast does it: numbers with a fraction, save those of double precision."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)


LARGEST = 1 << 26  # elements of a mask that is looked at
_NEVER = -1e4  # what is added to scores that are to vanish: at most this in use, -inf or the type's least number mostly


@dataclass(frozen=True, slots=True)
class MaskMeaning:
    """kind: full, causal, padding, causal and padding, packed, packed and causal, bias, other or unread. lengths: of
    packed documents, the same for all samples. right: padding is at the end of each sequence."""

    kind: str
    lengths: tuple[int, ...] = ()
    right: bool = False


def meaning_of(mask: Tensor) -> MaskMeaning:
    """mask: of scaled_dot_product_attention, boolean (True takes part) or added to the scores; 2 to 4 dimensions."""
    if mask.dim() < 2 or mask.numel() > LARGEST or mask.numel() == 0 or mask.is_meta:
        return MaskMeaning("unread")
    keep = _kept(mask.detach())
    if keep is None:
        return MaskMeaning("bias")
    rows, columns = keep.shape[-2:]
    keep = keep.reshape(-1, rows, columns)
    if bool(keep.all()):
        return MaskMeaning("full")
    used = keep.any(dim=-2, keepdim=True)  # keys that any query sees
    lower = torch.ones(rows, columns, dtype=torch.bool, device=keep.device).tril()
    if rows == columns and bool((keep == lower).all()):
        return MaskMeaning("causal")
    if bool((keep == used).all()):
        return MaskMeaning("padding", right=_at_the_end(used))
    # what padding attends to matters to nobody
    if rows == columns and bool(((keep == (lower & used)) | ~used.transpose(-2, -1)).all()):
        return MaskMeaning("causal and padding", right=_at_the_end(used))
    if rows == columns:
        for kind, inside in (("packed and causal", lower), ("packed", torch.ones_like(lower))):
            lengths = _documents(keep, inside)
            if lengths is not None:
                return MaskMeaning(kind, lengths)
    return MaskMeaning("other")


def _kept(mask: Tensor) -> Tensor | None:
    """Which pairs take part; None where the mask also shifts scores."""
    if mask.dtype == torch.bool:
        return mask
    keep = mask > _NEVER
    return keep if not bool((mask != 0)[keep].any()) else None


def _at_the_end(used: Tensor) -> bool:
    """Whether no key that is seen follows one that is not."""
    flags = used.to(torch.int8).flatten(1)
    return bool((flags[:, 1:] <= flags[:, :-1]).all())


def _documents(keep: Tensor, inside: Tensor) -> tuple[int, ...] | None:
    """Lengths of the documents of a block-diagonal mask that is the same for all samples."""
    first = keep[0]
    if not bool((keep == first).all()) or not bool(first.diagonal().all()):
        return None
    begins = first.to(torch.int8).argmax(dim=-1)  # the first key that each query sees: where its document begins
    if not bool((first == ((begins[:, None] == begins[None, :]) & inside)).all()):
        return None
    return tuple(int(count) for count in torch.unique_consecutive(begins, return_counts=True)[1])
