"""Which operator of a step made the first NaN, read from the graph that autograd kept for backward. On the CPU, before it runs.

Every node of the graph holds some of the tensors that its operator read or wrote. In the order in which the operators ran, the
first one that *read* a non-finite value names its producer among its inputs; where none did, the loss itself is the first.
The values are looked at in place: nothing is computed again and nothing is kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from perfagent.hooks.living import living

__all__ = ["first_bad_operator"]

MOST_NODES = 20_000
MOST_S = 2.0
_WRITTEN = ("result", "output", "out")


def first_bad_operator(loss: Any, names: Mapping[int, str]) -> dict[str, Any] | None:
    """{"operator"?, "read_by"?, "read_as"?, "after"?, "of"?}; names: parameters by id().

    operator: what made the value, from finite inputs; absent where it came from outside, as a batch or a parameter. read_by: the
    first operator that read it, and as what. of: a parameter that the operator uses; after: the last one used before it. None
    where the graph cannot be read: there is none, it is too large, or activation checkpointing would run the model again.
    """
    if loss.grad_fn is None or _checkpointed():
        return None
    nodes = _nodes(loss.grad_fn)
    if nodes is None:
        return None
    nodes.sort(key=lambda node: node._sequence_nr())
    until = time.monotonic() + MOST_S
    reader = producer = None
    read: list[str] = []
    for node in nodes:
        if time.monotonic() > until:
            return None
        bad = [name for name, tensor in _saved(node) if _is_bad(tensor)]
        if bad:
            if all(name.startswith(_WRITTEN) for name in bad):
                producer = node
            else:
                reader, read = node, bad
            break
    if producer is None:
        producer = loss.grad_fn if reader is None else _input_of(reader, read[0])
    at: Any = producer if producer is not None else reader
    found: dict[str, Any] = {}
    if producer is not None:
        found["operator"] = _name(producer)
    if reader is not None:
        found |= {"read_by": _name(reader), "read_as": read}
    own = [*_parameters_of(at, names)]
    if own:
        found["of"] = own[0]
    before = [name for node in nodes if node._sequence_nr() < at._sequence_nr() for name in _parameters_of(node, names)]
    if before:
        found["after"] = before[-1]
    return found


def _nodes(start: Any) -> list[Any] | None:
    seen, waiting = {start}, [start]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in seen:
                if len(seen) >= MOST_NODES:
                    return None
                seen.add(following)
                if not hasattr(following, "variable"):  # a leaf has nothing before it
                    waiting.append(following)
    return [node for node in seen if not hasattr(node, "variable")]


def _saved(node: Any) -> Iterator[tuple[str, Any]]:
    torch = sys.modules["torch"]
    for attribute in dir(node):
        if not attribute.startswith("_saved_"):
            continue
        try:
            value = getattr(node, attribute)
        except RuntimeError:  # released, or changed in place since
            continue
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, torch.Tensor):
                yield attribute.removeprefix("_saved_"), item


def _is_bad(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    if not tensor.is_cpu or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return False
    with torch.no_grad():
        return not bool(torch.isfinite(tensor).all())


def _input_of(reader: Any, read: str) -> Any:
    """What made the value that `reader` kept under the name `read`; None where it was given from outside: a batch, a number, a
    parameter."""
    inputs = [node for node, _ in reader.next_functions]
    place = _PLACES.get(read)
    if place is not None:
        place += _name(reader) in _ADDED_TO
    candidates = inputs if place is None or place >= len(inputs) else [inputs[place]]
    made = [node for node in candidates if node is not None and not hasattr(node, "variable") and not _is_view(node)]
    return max(made, key=lambda node: node._sequence_nr(), default=None)


# Which input an operator keeps under which name; the first of these operators is what the product is added to.
_PLACES = {
    "self": 0, "input": 0, "mat1": 0, "batch1": 0, "tensor1": 0, "query": 0,
    "other": 1, "weight": 1, "mat2": 1, "batch2": 1, "tensor2": 1, "key": 1, "value": 2,
}  # fmt: skip
_ADDED_TO = ("Addmm", "Addbmm", "Baddbmm", "Addcmul", "Addcdiv")


def _is_view(node: Any) -> bool:
    """Whether it only turns or casts a parameter, as the T of a linear layer's weight does."""
    return len(node.next_functions) == 1 and hasattr(node.next_functions[0][0], "variable")


def _parameters_of(node: Any, names: Mapping[int, str]) -> Iterator[str]:
    """Parameters that feed the operator directly, or through a transpose or cast (TBackward0, ToCopyBackward0)."""
    for following, _ in node.next_functions:
        if following is None:
            continue
        leaves = [following]
        if not hasattr(following, "variable") and len(following.next_functions) == 1:
            leaves = [following.next_functions[0][0]]
        for leaf in leaves:
            name = names.get(id(leaf.variable)) if leaf is not None and hasattr(leaf, "variable") else None
            if name is not None:
                yield name


def _name(node: Any) -> str:
    return str(node.name()).removesuffix("0").removesuffix("Backward")


def _checkpointed() -> bool:
    """Whether tensors of this process are held by torch.utils.checkpoint, whose saved tensors are made again when read."""
    frame = getattr(sys.modules.get("torch.utils.checkpoint"), "_CheckpointFrame", None)
    return frame is not None and bool(living(frame))
