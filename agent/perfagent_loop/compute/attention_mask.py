"""Reads what an attention mask says: nothing, causality, padding, packed documents, or something of its own.

Kernels that take no mask are the fast ones, and most masks in use say what a flag or a list of lengths says as well.
Reading a mask on a GPU waits for it: this is for looking once, not for every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["MaskKind", "MaskMeaning", "meaning_of"]

MaskKind = Literal[
    "full", "causal", "padding", "causal and padding", "packed", "packed and causal", "bias", "other", "unread"
]
LARGEST = 1 << 26  # elements of a mask that is looked at
_NEVER = -1e4  # what is added to scores that are to vanish: at most this in use, -inf or the type's least number mostly


@dataclass(frozen=True, slots=True)
class MaskMeaning:
    """kind: what the mask says. lengths: of the documents, where it is packed and the same for all samples; right:
    padding is at the end of each sequence."""

    kind: MaskKind
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
                return MaskMeaning(kind, lengths)  # type: ignore[arg-type]
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
