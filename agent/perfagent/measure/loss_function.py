"""Reads from autograd's graph what the loss is made of: which loss function, of how many classes, and two mistakes that show
in shapes and operators alone, without reading a number.

- `cross_entropy` takes logits. Fed with a softmax it still falls, but not below ln(e + C - 1) - 1 for C classes.
- A prediction of shape (N, 1) and a target of (N,) make a loss over all N * N pairs: its best prediction is the mean of the
  targets (torch warns of it on stderr).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

__all__ = ["is_packed", "loss_function"]

_MOST_NODES = 40
"""Between the root and the model's last layer there are a dozen, with several losses added up."""
_CROSS_ENTROPY = ("NllLossBackward0", "NllLoss2DBackward0")
_REGRESSIONS = {"MseLossBackward0": "mse", "SmoothL1LossBackward0": "smooth_l1", "HuberLossBackward0": "huber"}
_OTHERS = {
    **_REGRESSIONS,
    "BinaryCrossEntropyBackward0": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary_cross_entropy_with_logits",
}
_TAKES_LOGITS = ("LogSoftmaxBackward0", "BinaryCrossEntropyWithLogitsBackward0")
_SQUASHED = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}
_SAME_NUMBERS = (
    "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "PermuteBackward0", "TransposeBackward0", "CloneBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "SliceBackward0", "ToCopyBackward0", "SelectBackward0",
)  # fmt: skip
"""Operators that move numbers, and leave them as they are."""
_OF_A_DIFFERENCE = (*_REGRESSIONS, "PowBackward0", "AbsBackward0")
"""Regression losses, and the operators that hand-written ones apply to the difference. (Others compare all pairs on purpose.)"""
_PAIRS = ("SubBackward0", "ExpandBackward0")
_MEAN = 1  # of torch's `reduction`


def is_packed(kept: object) -> bool:
    """True if a hook packed what autograd keeps as `node._raw_saved_NAME`: to read it would run that hook (activation
    checkpointing would run the model again). Where torch does not say so (2.4, 2.6), all counts as packed."""
    return kept is not None and getattr(kept, "unpack_hook", kept) is not None


def loss_function(root: Tensor) -> dict[str, Any]:
    """Returns what is known, {} where nothing is: `kind` of the loss; of a cross entropy `classes`, `mean` where it is
    averaged, and `alone` where nothing is added to it or multiplied with it; `fed_by`: softmax or sigmoid, where it takes
    logits; `broadcast`: the shape of the prediction and that of the difference. root: the tensor on which backward is
    called."""
    found: dict[str, Any] = {}
    is_alone = True
    for node in _nodes(root):
        name = node.name()
        if name in _CROSS_ENTROPY or name in _OTHERS:
            found.setdefault("kind", _OTHERS.get(name, "cross_entropy"))
        if name in _CROSS_ENTROPY:
            classes = _shape(node.next_functions[0][0])
            if len(classes) > 1:
                found.setdefault("classes", classes[1])
                found.setdefault("mean", node._saved_reduction == _MEAN)  # type: ignore[attr-defined] # of that operator
                found.setdefault("alone", is_alone)
        is_alone = is_alone and (name in _SAME_NUMBERS or name == "DivBackward0")
        if name in _TAKES_LOGITS and (squashed := _SQUASHED.get(_maker(node.next_functions[0][0]))):
            found.setdefault("fed_by", squashed)
        if name in _OF_A_DIFFERENCE:
            shapes = next(filter(None, (_broadcast(one) for one, _ in node.next_functions)), None)
            if shapes:
                found.setdefault("broadcast", shapes)
    return found


def _nodes(root: Tensor) -> Iterator[Node]:
    """Nodes of the graph, those nearest to the root first."""
    waiting = [root.grad_fn]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.pop(0)
        if node is not None:
            yield node
            waiting += [before for before, _ in node.next_functions]


def _maker(node: Node | None) -> str:
    """The operator that made the numbers."""
    for _ in range(_MOST_NODES):
        if node is None or node.name() not in _SAME_NUMBERS:
            break
        node = node.next_functions[0][0]
    return "" if node is None else str(node.name())


def _broadcast(node: Node | None) -> list[list[int]] | None:
    """Shapes before and after, if (N, 1) or (N,) and a tensor without a gradient made (N, N)."""
    differentiable = [before for before, _ in node.next_functions if before is not None] if node is not None else []
    if node is None or node.name() not in _PAIRS or len(differentiable) != 1:
        return None  # of two predictions, each pair of a batch is meant
    if differentiable[0].name() == "ExpandBackward0" != node.name():
        return _broadcast(differentiable[0])
    before, after = _shape(differentiable[0]), _shape(node)
    is_square = len(after) == 2 and after[0] == after[1] > 1
    return [[*before], [*after]] if is_square and before in ((after[0], 1), after[:1]) else None


def _shape(node: Node | None) -> tuple[int, ...]:
    """Shape of a node's output; () with torch 2.4, which does not have it."""
    made = getattr(node, "_input_metadata", None)
    return tuple(made[0].shape) if made else ()
