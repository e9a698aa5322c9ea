"""Floating-point operations of a training step, counted once for each size of step while the user's own step runs.

Torch's recording of operators (`RecordFunction`, through its light profiler) tells name and shapes of each operator without
changing which kernel runs: results stay equal bit by bit, compiled code stays compiled, and nothing runs twice. A dispatch mode
such as `FlopCounterMode` does neither: with one on, torch.compile falls back to eager, and some backward formulas take another
path. Its formulas for matrix products and convolutions are the ones used here (torch/utils/flop_counter.py; operators.py).

What counts is the model's own arithmetic: 2 for a multiplication with its addition, matrix products, convolutions and attention,
forward and backward, in every call of the root model and every backward pass of one step. A loop may call parts of the model, or
a method of it, in the root's place: where the backward passes came through more than the calls of the root computed, the forward
pass is what they came through. Not counted: what activation checkpointing computes again, the attention scores that a fused
backward computes again, elementwise work, the optimizer, and models without gradients other than the root. Causal attention
counts the pairs it needs, where its causality is known: in eager code from autograd's graph and, where that has no node of it,
from the call of `scaled_dot_product_attention`; in compiled code from the code that inductor wrote. Operators whose arithmetic
does not follow from shapes (variable-length attention, recurrent kernels, sparse matrices, other people's) make the count
unknown; so do kernels that inductor wrote itself for products, and second derivatives taken by `torch.autograd.grad` of gradients
that a backward pass left a graph of. A step with nested tensors, or with a profiler of the script's in it, is not recorded.

A step of another size gets its own count, up to MOST_SIZES; until then, and beyond, a count is carried over to it: products and
convolutions grow with the tokens (or samples), attention with samples times length squared. Where the tokens are not known, the
shape of a sample is part of the size, and no count is carried over to another shape: what pictures of another resolution or
longer recordings cost does not follow from it. Where the shape is not known either (graphs, lists of pictures), nothing is told.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from perfagent.signals.batch_size import Shape, inputs
from perfagent.signals.compiled import causal_in_compiled_code, compiled, products_in_own_kernels
from perfagent.signals.flops.device_peaks import peak_flops
from perfagent.signals.flops.op_formulas import Attended, Counted, Op, causal_share, count
from perfagent.signals.flops.step_recording import FlopCount, Size

__all__ = ["StepFlops", "own_operations"]

MOST_SIZES = 8
STEADY_STEPS = 3
"""So long the input must have kept its shape before a step is counted: a framework may fetch a batch or two ahead."""


class StepFlops:
    """Operations per second of each step, and their share of what the device can do.

    device: index of this rank's CUDA device, or None.
    """

    def __init__(self, device: Callable[[], int | None]) -> None:
        self._device = device
        self._known: dict[Size, Counted] = {}
        self._newest: tuple[int, Size | None] | None = None  # step and size
        self._shape: Shape | None = None
        self._changed = -STEADY_STEPS  # steps completed when the shape last changed
        self._wasted = 0  # looks at steps whose size did not become known
        self.look: FlopCount | None = None
        """The step that is recorded now: its size is kept when its row comes by."""
        self.kind = ""
        self.tells = True
        self._peak: float | None = None
        self._asked = False

    def wants(self) -> bool:
        """Whether a step should be counted: there is none yet, or the last step had a size of its own."""
        if not self.tells or self._newest is None:
            return False
        step, size = self._newest
        if size is None or size in self._known or len(self._known) >= MOST_SIZES or self._wasted >= MOST_SIZES:
            return False
        return bool(size[1]) or self._is_settled(step)

    def forget(self) -> None:
        """What is trained has changed: nothing that was counted holds any longer."""
        self._known.clear()
        self._wasted = 0
        self.tells = True

    def has_seen(self, step: int) -> bool:
        """Whether the row of that step has been here."""
        return self._newest is not None and self._newest[0] >= step

    def take(self, look: FlopCount, model: Any) -> None:
        """The result of a step that was recorded, once the row of that step has been here."""
        size, self.look = look.size, None
        if look.failed or look.gave_way:
            self.tells = False  # a profiler that begins in the midst of a call is in danger from ours
            return
        if size is None or look.broken_off:
            self._wasted += 1
            return  # the step was cut short, the shape of the input changed, or it was no step to record
        counted = own_operations(look, None, model, size[1] // size[0] if size[0] and not size[1] % size[0] else 0)
        if True not in look.operators:
            return  # the same: there was no backward pass
        if counted.unknown or not counted.total:
            self.tells = False  # a share of what there is to count is no count
            return
        self._known[size] = counted
        self.kind = counted.kind or look.half or _type_of(model)
        self._asked = False

    def add(self, step: int, values: dict[str, float], samples: int, tokens: int, seconds: float) -> None:
        """What a step's row says of it."""
        flops = self.of(step, samples, tokens)
        if self.look is not None and self._newest is not None and step == self.look.step and (tokens or self._is_settled(step)):
            self.look.size = self._newest[1]
        if flops is None or not seconds:
            return
        values["flops_per_s"] = flops / seconds
        peak = self._peak_flops()
        if peak is not None and flops / seconds <= peak:  # above it, the type that it multiplies in is not what it seems
            values["mfu"] = flops / seconds / peak

    def is_steady(self, first: int, last: int) -> bool:
        """Whether no step from `first` to `last` is the one that is looked at, nor compared with a device's peak."""
        looked_at = self.look is not None and first <= self.look.step <= last
        return not looked_at and self._peak_flops() is None

    def of(self, last: int, samples: int, tokens: int) -> float | None:
        """What each of some steps of one size computes; `last`: the newest of them."""
        shape = self._shape_until(last)
        size = (samples, tokens) if tokens else None if shape is None else (samples, 0, *shape)
        self._newest = last, size
        return None if size is None else self._flops(size)

    def _shape_until(self, last: int) -> Shape | None:
        """The shape of a sample in the steps after the newest one, up to `last`; None where it is not known, or changed."""
        changes, changed = inputs.changes, False
        while changes and changes[0][0] < last:
            completed, shape = changes.popleft()
            while changes and changes[0][0] == completed:  # what the step fetched besides, from another loader: its last counts
                _, shape = changes.popleft()
            if shape != self._shape and self._newest is not None:
                self._changed = completed
                changed = changed or completed > self._newest[0]
            self._shape = shape
        return None if changed else self._shape

    def _is_settled(self, step: int) -> bool:
        return step - self._changed >= STEADY_STEPS

    def _flops(self, size: Size) -> float | None:
        counted = self._known.get(size)
        if counted is not None:
            return counted.total
        alike = [known for known in self._known if known[0] and bool(known[1]) == bool(size[1]) and known[2:] == size[2:]]
        if not alike or not size[0]:
            return None
        near = min(alike, key=lambda known: abs(known[1] - size[1]) + abs(known[0] - size[0]))
        counted = self._known[near]
        samples = size[0] / near[0]
        grows = size[1] / near[1] if near[1] else samples
        return counted.products * grows + counted.attention * grows * (grows / samples)

    def _peak_flops(self) -> float | None:
        if not self._asked:
            self._asked, self._peak = True, None
            device, torch = self._device(), sys.modules["torch"]
            if device is not None:
                tensor_cores = self.kind == "float32" and _multiplies_in_tf32(torch)
                self._peak = peak_flops(torch.cuda.get_device_name(device), "tf32" if tensor_cores else self.kind)
        return self._peak


def _multiplies_in_tf32(torch: Any) -> bool:
    """Whether float32 matrices are multiplied in TF32. Where it was set by its newer name, the older one raises."""
    matmul = torch.backends.cuda.matmul
    try:
        return getattr(matmul, "fp32_precision", "") == "tf32" or bool(matmul.allow_tf32)
    except RuntimeError:
        return False


def own_operations(look: FlopCount, causal: Mapping[tuple[Any, Any], float] | None, model: Any, length: int = 0) -> Counted:
    """All calls of a step together.

    causal: (shape of the query, shape of the key) -> share of the pairs that attention needs; None: as the step's code says.
    length: tokens of one sample; 0 where they are not known.

    What compiled code computes again in its backward pass bears no mark. Where blocks are checkpointed, what goes beyond twice
    the forward pass is taken for it: exact where every product needs both gradients, too much by at most what is computed again
    where weights are frozen.
    """
    for operators in look.operators.values():
        operators.settle(look.nodes)
    attended = Attended(_causal_shares(look) if causal is None else causal, length)
    if False in look.operators and True in look.operators:
        look.operators[False].close_by(look.operators[True])
    ways = {backward: count(operators.ran, attended, operators.not_told) for backward, operators in look.operators.items()}
    forward, behind = ways.get(False, Counted()), ways.get(True, Counted())
    passed, kind = _passed(look, attended)
    if passed.total > forward.total:
        forward.products, forward.attention = passed.products, passed.attention
    products, attention = behind.products, behind.attention
    hidden = {"kernels of the compiler's own"} if compiled() and products_in_own_kernels() else set()
    if compiled() and _checkpoints(model):
        products, attention = min(products, 2 * forward.products), min(attention, 2 * forward.attention)
    return Counted(
        forward.products + products,
        forward.attention + attention,
        forward.recomputed + behind.recomputed + (behind.products - products) + (behind.attention - attention),
        forward.unknown | behind.unknown | hidden,
        kind if 2 * passed.total > forward.total else "",
    )


def _passed(look: FlopCount, attended: Attended) -> tuple[Counted, str]:
    """What the backward passes came through, and the type in which most of it was multiplied."""
    by_type: dict[str, Counter[Op]] = {}
    for number, op in look.operators[True].passed if True in look.operators else ():
        by_type.setdefault(look.types.get(number, ""), Counter())[op] += 1
    counted = {kind: count(ran, attended) for kind, ran in by_type.items()}
    every = Counted(sum(one.products for one in counted.values()), sum(one.attention for one in counted.values()))
    return every, max(counted, key=lambda kind: counted[kind].total, default="")


def _checkpoints(model: Any) -> bool:
    """Whether blocks of the model compute their activations again: by perfagent, transformers or torch's checkpoint_wrapper."""
    return model is not None and any(
        vars(module).get("_perfagent_checkpointing") is not None
        or vars(module).get("gradient_checkpointing") is True
        or "_checkpoint_wrapped_module" in module._modules
        for module in model.modules()
    )


def _causal_shares(look: FlopCount) -> dict[tuple[Any, Any], float]:
    """By shapes of query and key: the share of pairs that the step's attention needs."""
    if not look.calls:
        ran = (op for operators in look.operators.values() for op in operators.ran)
        attended = {op.attended[:2] for op in ran if op.attends and len(op.attended) == 3 and all(map(len, op.attended))}
        if not attended or not causal_in_compiled_code():
            return {}
        return {(query, key): causal_share(query[-2], key[-2]) for query, key in attended}
    shares: dict[tuple[Any, Any], list[float]] = {}
    for query, key, causal in look.calls:
        shares.setdefault((query, key), []).append(causal_share(query[-2], key[-2]) if causal else 1.0)
    return {shapes: sum(each) / len(each) for shapes, each in shares.items()}


def _type_of(model: Any) -> str:
    """The type of most of the model's numbers; Accelerate's mixed precision where that is on, since it hides in the model."""
    shared = getattr(getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), "_shared_state", {})
    mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(str(shared.get("_mixed_precision", "")))
    if mixed is not None or model is None:
        return mixed or ""
    modules = [*model.modules()]
    for module in modules:  # FSDP2 casts what it gathers
        asked = getattr(type(module), "_get_fsdp_state", None)
        policy = getattr(asked(module) if asked is not None else None, "_mp_policy", None)
        if policy is not None and policy.param_dtype is not None:
            return str(policy.param_dtype).removeprefix("torch.")
    sizes: Counter[Any] = Counter()
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}  # a shared one once
    for parameter in parameters.values():
        sizes[parameter.dtype] += parameter.numel()
    return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.") if sizes else ""
