"""Finds the operator of a step that made the first NaN, in the graph that autograd kept for backward. On the CPU,
before backward runs.

Every node of the graph holds some of the tensors that its operator read or wrote. In the order in which the operators
ran, the first one that *read* a non-finite value names its producer among its inputs; where none did, the loss itself
is the first. The values are looked at in place and nothing is kept; of a few operators that do not keep what they made
the result is computed once more, beside the training, within bounds of work, memory and time. -inf is what masks hold
in healthy trainings: only NaN and
+inf count, and -inf where the operator that made them read it.
"""

from __future__ import annotations

import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from perfagent.boundary.saved_tensors import is_packed
from perfagent.rootcause.batch import can_be_counted

__all__ = ["COMPILED", "first_bad_operator", "leaves_of"]

MOST_NODES = 20_000
MOST_S = 2.0
MOST_RUN_AGAIN, MOST_WORK, MOST_MADE = 64, 2**28, 2**25
"""Operators that are run again, multiplications of one of them, and numbers that it makes (128 MiB of memory)."""
_TURNS = ("T", "ToCopy", "View", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Slice", "Select", "Alias", "Expand")
_PASSES_ON = ("Mean", "Sum", "Neg", "View", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Clone", "Alias")
_STAYS_FINITE = (
    "Tanh", "Sigmoid", "Relu", "NativeDropout", "Index", "IndexSelect", "Gather", "UnsafeView", "Clone",
    *(name for name in _TURNS if name != "ToCopy"),  # which may overflow
)  # fmt: skip
"""What these make of finite values is finite, and they do not keep what they read: the bad value was there before
them."""
_OF_MASKS = ("Softmax", "LogSoftmax")
"""The same, but for -inf in all of a row; masks are set outside of what torch.compile compiled or inside, not in
between."""
_ADDS_UP = ("Add", "Sub", "Cat", "Stack", "Where", "MaskedFill")
"""What these put out was mostly in one of the tensors that they were given, of which they keep none."""
_SMALL = 16.0
"""By so much a value may be multiplied without being suspected of overflowing there."""
COMPILED = "CompiledFunction"
"""All that torch.compile made one function of: what happens inside is not in the graph."""
_WRITTEN = ("result", "output", "out")
_UNREAD_IN_TRAINING = ("running_mean", "running_var")
"""What a normalization keeps and only updates, unless it is in evaluation mode."""


def first_bad_operator(
    loss: Any,
    names: Mapping[int, str],
    buffers: Mapping[int, str] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any] | None:
    """{"operator"?, "inputs_known"?, "inputs_unseen"?, "read_by"?, "read_as"?, "buffer"?, "minus_infinity"?, "made"?,
    "after"?, "before"?, "of"?}; names: parameters by id(), all of them good; buffers: the same of these, good or bad.

    operator: what made the value, from finite inputs; absent where it came from outside, as a batch or a buffer.
    inputs_known:
    nothing from outside, such as a batch, can be what it was made from. inputs_unseen: of finite ones it makes nothing
    bad, or hardly ever, and what it was given cannot be seen. read_by: the first operator that read it, and as what;
    buffer: the one that it read there. minus_infinity: the operator itself read -inf; {"read_as", "from"?}, from: what
    made that, absent where it came from outside. made: "nan", "inf" or "-inf", where the operator was run again to know
    that it was this one. of: a parameter that the operator uses; after: the last one used before it; before: the first
    one used after it. None where the graph cannot be read: there is none, it is too large, or somebody's hooks keep its
    tensors elsewhere.
    """
    if loss.grad_fn is None:
        return None
    nodes = _nodes(loss.grad_fn)
    if nodes is None:
        return None
    nodes.sort(key=lambda node: node._sequence_nr())
    until = clock() + MOST_S

    def over() -> bool:
        return clock() > until

    reader = producer = None
    read: list[tuple[str, Any]] = []
    good: set[Any] = set()  # what put out something that was kept
    for node in nodes:
        if over():
            return None
        saved = _saved(node)
        if saved is None:
            return None
        bad = [(name, tensor) for name, tensor in saved if _is_bad(tensor)]
        good.update(
            one.grad_fn for _, one in saved if one.grad_fn is not None and not any(one is other for _, other in bad)
        )
        if bad:
            read = [(name, tensor) for name, tensor in bad if not name.startswith(_WRITTEN)]
            if read:
                reader = node
            else:
                producer = node
            break
    if producer is None:
        producer = _maker(loss.grad_fn) if reader is None else _made_by(read[0][1])
    found: dict[str, Any] = {}
    lower, read_it = None, ""
    if producer is not None:
        producer, made = _origin(_past_what_stays_finite(producer), over)
        while not made and (given := _only_unseen(producer, good, names)) is not None:
            producer, made = _origin(_past_what_stays_finite(given), over)
        lower = None if made else _maker_of_minus_infinity(producer, over)
        if lower is not None:
            read_it, (producer, made) = _name(producer), lower
        found["operator"] = _name(producer)
        if made:
            found["made"] = made
        elif found["operator"] in (*_ADDS_UP, *_OF_MASKS):
            found["inputs_unseen"] = True
        if made in ("nan", "inf") or _inputs_are_known(producer, names, over):
            found["inputs_known"] = True
        below = _minus_infinity(producer)
        if below is not None:
            found["minus_infinity"] = below
    if lower is not None:
        found["read_by"] = read_it
    elif reader is not None:
        found |= {"read_by": _name(reader), "read_as": [name for name, _ in read]}
        buffer = (buffers or {}).get(id(read[0][1]))
        if buffer is not None:
            found["buffer"] = buffer
    at: Any = producer if producer is not None else reader
    own = [*_parameters_of(at, names)]
    if own and _name(at) != COMPILED:  # to which all parameters of the model are handed
        found["of"] = own[0]
    before = [name for node in nodes if node._sequence_nr() < at._sequence_nr() for name in _parameters_of(node, names)]
    if before:
        found["after"] = before[-1]
    later = (name for node in nodes if node._sequence_nr() > at._sequence_nr() for name in _parameters_of(node, names))
    following = next(later, None)
    if following is not None:
        found["before"] = following
    return found


def _inputs_are_known(producer: Any, names: Mapping[int, str], over: Callable[[], bool]) -> bool:
    """Whether all that the operator computed from was kept, or is a parameter, or was computed by operators of which
    the same is so. What was kept is good: it was read before anything bad was."""
    waiting, seen = [producer], {producer}
    while waiting:
        if over():
            return False
        node = waiting.pop()
        kept = _saved(node) or []
        places, makers = {_place(node, name) for name, _ in kept}, {tensor.grad_fn for _, tensor in kept}
        for place, (before, _) in enumerate(node.next_functions):
            if place in places or (before is not None and before in makers) or before in seen:
                continue
            if before is None or (hasattr(before, "variable") and id(before.variable) not in names):
                return False
            if not hasattr(before, "variable"):
                seen.add(before)
                waiting.append(before)
    return True


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


def _saved(node: Any) -> list[tuple[str, Any]] | None:
    """The tensors that a node keeps, by name. None where hooks hold one of them: to read it would call them (activation
    checkpointing would run the model again, and what offloading gives back once is then missing in backward)."""
    torch = sys.modules["torch"]
    found: list[tuple[str, Any]] = []
    unread = _UNREAD_IN_TRAINING if getattr(node, "_saved_training", False) else ()
    for attribute in dir(node):
        # the latter: a function of the user's
        if not attribute.startswith("_raw_saved_") or attribute == "_raw_saved_tensors":
            continue
        if attribute.removeprefix("_raw_saved_") in unread:
            continue
        try:
            kept = getattr(node, attribute)
            if any(map(is_packed, _each(kept))):
                return None
            value = getattr(node, attribute.removeprefix("_raw"))
        except RuntimeError:  # released, or changed in place since
            continue
        found += [
            (attribute.removeprefix("_raw_saved_"), item) for item in _each(value) if isinstance(item, torch.Tensor)
        ]
    return found


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _is_bad(tensor: Any) -> bool:
    """Whether it holds NaN or +inf."""
    if not _is_read(tensor):
        return False
    with sys.modules["torch"].no_grad():
        if bool(tensor.isfinite().all()):
            return False
        return tensor.is_complex() or bool((tensor.isnan() | (tensor == math.inf)).any())


def _holds_minus_infinity(tensor: Any) -> bool:
    with sys.modules["torch"].no_grad():
        return _is_read(tensor) and not tensor.is_complex() and bool((tensor == -math.inf).any())


def _is_read(tensor: Any) -> bool:
    """Not of a class of its own: it may run anything, as a DTensor asks the other ranks."""
    torch = sys.modules["torch"]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return tensor.is_cpu and can_be_counted(tensor)


def _maker(node: Any) -> Any:
    """The last operator up to this one that can have made a value: what only adds up, turns or shapes passes values
    on."""
    while _name(node) in _PASSES_ON:
        before = node.next_functions[0][0]
        if before is None or hasattr(before, "variable"):
            break
        node = before
    return node


def _past_what_stays_finite(node: Any) -> Any:
    """The operator that can have made what this one put out."""
    while True:
        name, place = _name(node), 0
        if name == "Mul":
            scaled = _scaled(node)
            if scaled is None:
                return node
            place = scaled
        elif name not in _STAYS_FINITE and name not in _OF_MASKS:
            return node
        before = node.next_functions[place][0]
        if before is None or hasattr(before, "variable") or (name in _OF_MASKS and _name(before) != COMPILED):
            return node
        node = before


def _only_unseen(node: Any, good: set[Any], names: Mapping[int, str]) -> Any:
    """What made the one of the tensors that an operator adds up, or puts together, which is not known to be good; None
    where there are more, or it came from outside."""
    if _name(node) not in _ADDS_UP:
        return None
    given = [before for before, _ in node.next_functions if before not in good]
    unseen = [before for before in given if not (hasattr(before, "variable") and id(before.variable) in names)]
    return unseen[0] if len(unseen) == 1 and unseen[0] is not None and not hasattr(unseen[0], "variable") else None


def _scaled(node: Any) -> int | None:
    """Which factor of a product cannot be seen, where the other one is small and finite, as a dropout's mask is."""
    torch = sys.modules["torch"]
    kept = dict(_saved(node) or ())
    if len(kept) != 1:
        return None
    ((name, factor),) = kept.items()
    with torch.no_grad():
        small = _is_read(factor) and factor.numel() > 0 and bool(factor.abs().max() <= _SMALL)
    return 1 - _PLACES[name] if small else None


def _origin(producer: Any, over: Callable[[], bool]) -> tuple[Any, str]:
    """What made the value that `producer` put out, and what that was, as far as it can be known; else the producer
    itself.

    Not every operator keeps what it read: the inf of a product of half-precision matrices is first met as the NaN of a
    softmax two operators later. Those in between that keep all they read are run again, from what they keep.
    """
    waiting, seen, makers = [producer], {producer}, []
    while waiting and len(seen) < MOST_RUN_AGAIN:
        if over():  # the first of those that are known is not the first of all
            return producer, ""
        node = waiting.pop()
        saved = dict(_saved(node) or ())
        made = _run_again(node, saved)
        given = any(not name.startswith(_WRITTEN) and _holds_minus_infinity(one) for name, one in saved.items())
        if made or given:  # where a -inf came from is the business of `_minus_infinity`
            makers.append((made in (None, "-inf"), node._sequence_nr(), node, made or ""))
        elif made is None and (node is producer or not any(name.startswith(_WRITTEN) for name in saved)):
            inputs = [one for one, _ in node.next_functions if one is not None and not hasattr(one, "variable")]
            fresh = [one for one in inputs if one not in seen]
            seen.update(fresh)
            waiting += fresh
    if not makers:
        return producer, ""
    _, _, node, made = min(makers, key=lambda maker: maker[:2])
    return node, made


def _run_again(node: Any, saved: dict[str, Any]) -> str | None:
    """What bad value the operator makes of what it keeps: "nan", "inf", "-inf", or "" for none; None where it does not
    keep enough, would take too long, or read something bad itself."""
    torch = sys.modules["torch"]
    kind = _AGAIN.get(_name(node))
    if kind is None:
        return None
    names, run = kind
    given = [saved[name] for name in names if name in saved and _is_read(saved[name])]
    if len(given) < len(names):
        return None
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            made, work = _size(run, given)
            if made > MOST_MADE or work > MOST_WORK or not all(bool(one.isfinite().all()) for one in given):
                return None
            result = run(*given)
        except RuntimeError:  # of shapes or types that it does not take in this way
            return None
        if bool(result.isnan().any()):
            return "nan"
        return "inf" if bool((result == math.inf).any()) else "-inf" if bool((result == -math.inf).any()) else ""


def _size(run: Callable[..., Any], given: list[Any]) -> tuple[int, int]:
    """How many numbers it makes, and by how many multiplications."""
    if run is operator.matmul:
        first, second = given
        return first.shape[:-1].numel() * second.shape[-1], first.numel() * second.shape[-1]
    made = math.prod(sys.modules["torch"].broadcast_shapes(*(one.shape for one in given)))
    return made, made


# Operators that keep what they read and not what they made: what they read, and how they are run again.
_AGAIN: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    **{name.capitalize(): (("self",), operator.methodcaller(name)) for name in ("log", "log1p", "log2", "log10", "acos", "asin")},
    "Mul": (("self", "other"), operator.mul), "Div": (("self", "other"), operator.truediv),
    "Mm": (("self", "mat2"), operator.matmul), "Bmm": (("self", "mat2"), operator.matmul),
    "Addmm": (("mat1", "mat2"), operator.matmul), "Baddbmm": (("batch1", "batch2"), operator.matmul),
}  # fmt: skip


def _minus_infinity(producer: Any) -> dict[str, Any] | None:
    """As what an operator read -inf, and what made that."""
    read: list[str] = []
    node, origin = producer, None
    while node is not None:
        saved = _saved(node) or ()
        below = [(name, one) for name, one in saved if not name.startswith(_WRITTEN) and _holds_minus_infinity(one)]
        if not below:
            break
        read = read or [name for name, _ in below]
        node = origin = _made_by(below[0][1])
    if not read:
        return None
    return {"read_as": read, **({"from": _name(origin)} if origin is not None else {})}


def _maker_of_minus_infinity(producer: Any, over: Callable[[], bool]) -> tuple[Any, str] | None:
    """What made the -inf that an operator read, and "-inf" where it is known to have, if between the two it was only
    added to and the like: a linear layer makes NaN of it, and is not to blame."""
    below = [
        one for name, one in _saved(producer) or () if not name.startswith(_WRITTEN) and _holds_minus_infinity(one)
    ]
    last = _made_by(below[0]) if below else None
    if last is None:
        return None
    waiting, seen = [last], {last}
    makers: list[tuple[int, Any]] = []
    while waiting and len(seen) < MOST_RUN_AGAIN and not over():
        node = waiting.pop()
        saved = dict(_saved(node) or ())
        made = _run_again(node, saved)
        if made == "-inf" or (not made and any(map(_holds_minus_infinity, saved.values()))):
            makers.append((node._sequence_nr(), node))
        elif made is None:
            inputs = [one for one, _ in node.next_functions if one is not None and not hasattr(one, "variable")]
            fresh = [one for one in inputs if one not in seen]
            seen.update(fresh)
            waiting += fresh
    if not makers and _name(last) in _ADDS_UP:  # it was given from outside
        return last, ""
    if not makers or last in (node for _, node in makers):
        return None
    return min(makers, key=lambda maker: maker[0])[1], "-inf"


def leaves_of(loss: Any) -> set[int] | None:
    """The parameters, by id(), that a loss was computed from; None where its graph is too large."""
    nodes = _nodes(loss.grad_fn) if loss.grad_fn is not None else None
    if nodes is None:
        return None
    leaves = (before for node in nodes for before, _ in node.next_functions if hasattr(before, "variable"))
    return {id(leaf.variable) for leaf in leaves}


def _made_by(kept: Any) -> Any:
    """What made a tensor that some operator kept; None where it was given from outside: a batch, a number, a
    parameter."""
    maker = kept.grad_fn
    return None if maker is None or _is_view(maker) else maker


def _place(node: Any, kept: str) -> int | None:
    place = _PLACES.get(kept)
    return None if place is None else place + (_name(node) in _ADDED_TO)


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
    """Parameters that feed the operator directly, or through what only turns or casts them (TBackward0,
    ToCopyBackward0)."""
    for following, _ in node.next_functions:
        if following is None:
            continue
        leaf = following
        for _ in range(3):
            if leaf is None or hasattr(leaf, "variable") or _name(leaf) not in _TURNS:
                break
            leaf = leaf.next_functions[0][0]
        name = names.get(id(leaf.variable)) if leaf is not None and hasattr(leaf, "variable") else None
        if name is not None:
            yield name


def _name(node: Any) -> str:
    return str(node.name()).removesuffix("0").removesuffix("Backward")
