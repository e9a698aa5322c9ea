"""The operators that compute: their names, and one call of such an operator."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["CONVOLUTIONS", "GRADIENTS", "PRODUCTS", "Op", "Shape", "Shapes"]

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::_scaled_mm", "aten::_scaled_mm_v2"), 0),
    **dict.fromkeys(("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"), 0),
    **dict.fromkeys(("aten::addmm", "aten::addmv", "aten::_addmm_activation", "aten::baddbmm", "aten::addbmm"), 1),
}
"""Operator -> the place of the first factor among its inputs; the second one follows it."""
CONVOLUTIONS = frozenset(("aten::convolution", "aten::convolution_overrideable"))
GRADIENTS = "aten::convolution_backward"
_ATTENTION = re.compile(r"aten::_scaled_dot_product_(flash|efficient|cudnn|fused)_attention.*")


class Op(NamedTuple):
    """One operator as torch recorded it. shapes: of its inputs; for a convolution, followed by that of its result.

    transposed: of a convolution; None if not known.
    gradients: of a convolution's backward pass, how many of two it computes.
    causal: of attention; None if not known.
    """

    name: str
    shapes: Shapes
    transposed: bool | None = None
    gradients: int = 2
    causal: bool | None = None

    @property
    def is_gradient(self) -> bool:
        return self.name.endswith("_backward")

    @property
    def attends(self) -> bool:
        return _ATTENTION.fullmatch(self.name) is not None

    @property
    def attended(self) -> Shapes:
        """For attention: the shapes of query, key and value."""
        return self.shapes[1:4] if self.is_gradient else self.shapes[:3]

    @property
    def forward(self) -> Op:
        """For a gradient: the operator that it is the gradient of, or one with the same cost."""
        if self.attends:
            return self._replace(name=self.name.removesuffix("_backward"), shapes=self.attended)
        return self._replace(gradients=1)
