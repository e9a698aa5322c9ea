"""A tensor as libraries for 8-bit weights and optimizer states make them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["InEightBits"]


class InEightBits(torch.Tensor):
    """As torchao's: it says float32, has no storage of its own, and holds codes and scales, which are ordinary numbers.
    Nothing can be computed with it here."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, *shape: int, scales: int = 4) -> InEightBits:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scales = torch.zeros(shape, dtype=torch.uint8), torch.ones(scales)
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:  # of a Parameter that is made of it
            return args[0]
        raise NotImplementedError(f"{function} is not for tensors in 8 bits here")
