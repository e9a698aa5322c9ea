"""Reads from autograd's graph what torch's recording of operators lacks.

That is the dtype of products, the results and gradients of convolutions, and whether attention is causal. Each node has
the number that the recording gives its operator.

Only the node's own fields are read: the tensors that it keeps for its backward pass may be on another device, on a
disk, or be recomputed on access. Guessed from the order of operators, convolutions counted 1.05 to 1.67 times too much
(two branches from the input, frozen or adapted layers, text next to pictures).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from perfagent.signals.convolutions import NODES, Convolution

__all__ = ["PRODUCTS", "in_graph"]

PRODUCTS = re.compile(r"(Mm|Addmm|AddmmActivation|Bmm|Baddbmm|Addbmm|Mv|Addmv|GroupedMm|ScaledDotProduct\w+)Backward0")
"""Nodes whose gradients are products of the same size as in the forward pass. Convolutions are found separately."""


def in_graph(roots: Iterable[Any]) -> Iterable[tuple[Any, str, Convolution | bool | None]]:
    """Yields (node, dtype, convolution or whether it is causal) of all products that a backward pass from these
    tensors may meet.

    Half a microsecond per node.
    """
    waiting = [root.node if hasattr(root, "node") else root.grad_fn for root in roots]
    seen, computes = set(), {type(None): False}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = type(node)
        if kind not in computes:
            computes[kind] = node.name() in NODES or PRODUCTS.fullmatch(node.name()) is not None
        if node is not None:
            waiting += [after for after, _ in node.next_functions]
        if computes[kind]:
            made = getattr(node, "_input_metadata", None)  # torch 2.4 has none: neither dtypes nor results are known
            yield node, str(made[0].dtype).removeprefix("torch.") if made else "", _told(node, made)


def _told(node: Any, made: Any) -> Convolution | bool | None:
    if node.name() not in NODES:
        return getattr(node, "_saved_is_causal", None)
    if not made:
        return None
    gradients = sum(after is not None for after, _ in node.next_functions[:2])
    return Convolution(tuple(made[0].shape), node._saved_transposed, gradients)
