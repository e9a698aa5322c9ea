"""Reads from autograd's graph what torch's recording of operators lacks: the dtype of products, the results and gradients
of convolutions, and whether attention is causal. Each node has the number that the recording gives its operator.

Only the node's own fields are read: the tensors that it keeps for its backward pass may be on another device, on a
disk, or be recomputed on access. Guessed from the order of operators, convolutions counted 1.05 to 1.67 times too much
(two branches from the input, frozen or adapted layers, text next to pictures).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch.autograd.graph import GradientEdge, Node

__all__ = ["PRODUCT_NODES", "Convolution", "in_graph"]

_CONVOLUTIONS = frozenset(("ConvolutionBackward0", "ConvolutionOverrideableBackward0"))
PRODUCT_NODES = re.compile(
    r"(Mm|Addmm|AddmmActivation|Bmm|Baddbmm|Addbmm|Mv|Addmv|GroupedMm|ScaledDotProduct\w+|Convolution(Overrideable)?)Backward0"
)
"""Nodes whose gradients are products of the same size as in the forward pass."""


class Convolution(NamedTuple):
    """gradients: how many of input and weight get one."""

    out: tuple[int, ...]
    transposed: bool
    gradients: int

    def fits(self, x: tuple[int, ...], weight: tuple[int, ...]) -> bool:
        """True if it may have had these inputs. (Node numbers are not enough: each thread has its own.)"""
        channels = weight[0] == (x[1] if self.transposed else self.out[1])
        return channels and len(x) == len(self.out) and x[0] == self.out[0]


def in_graph(roots: Iterable[torch.Tensor | GradientEdge]) -> Iterator[tuple[Node, str, Convolution | bool | None]]:
    """Yields (node, dtype, convolution or whether it is causal) of all products that a backward pass from these
    tensors may meet. Half a microsecond per node."""
    waiting = [getattr(root, "node", None) or getattr(root, "grad_fn", None) for root in roots]
    seen: set[Node | None] = {None}
    computes: dict[type[Node], bool] = {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node) not in computes:
            computes[type(node)] = PRODUCT_NODES.fullmatch(node.name()) is not None
        waiting += [after for after, _ in node.next_functions]
        if computes[type(node)]:
            made = getattr(node, "_input_metadata", None)  # torch 2.4 has none: neither dtypes nor results are known
            known: Convolution | bool | None = getattr(node, "_saved_is_causal", None)
            if made and node.name() in _CONVOLUTIONS:
                gradients = sum(after is not None for after, _ in node.next_functions[:2])
                known = Convolution(tuple(made[0].shape), node._saved_transposed, gradients)
            yield node, str(made[0].dtype).removeprefix("torch.") if made else "", known
