"""Counts the floating-point operations of a training step, once for each size of step, while the user's own step runs.

How: torch's recording of operators (`RecordFunction`, through its light profiler) gives name and shapes of each
operator without changing which kernel runs.

What counts: matrix products, convolutions and attention, forward and backward, in every call of the root model and every
backward pass of the step; a multiplication with its addition counts 2. Where a loop calls parts of the model instead of
the root, the forward pass is what the backward passes came through. Causal attention in one kernel counts the pairs it
needs. Recomputation, elementwise work, the optimizer and models without gradients do not count.

There is no count with operators whose arithmetic does not follow from shapes (variable-length attention, recurrent
kernels, sparse matrices, other libraries), convolutions whose result no module or gradient shows, kernels that
inductor wrote itself for products, `create_graph`, nested tensors, or a profiler of the script's in the step.

Other sizes: each gets its own count, up to MOST_SIZES. Until then a count is scaled: products and convolutions with the
tokens (or samples), attention with samples times length squared. Where tokens are not known, the shape of a sample is
part of the size; where that is not known either (graphs, lists of pictures), there is no count.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from perfagent.boundary.dynamo import compiled
from perfagent.device import accelerator
from perfagent.libraries import precision
from perfagent.measure.batches.size import Inputs, inputs
from perfagent.measure.flops.op import Op, Shape, Shapes
from perfagent.measure.flops.step_recording import FlopCount, Size
from perfagent.probes.flops.device_peaks import peak_flops
from perfagent.probes.flops.inductor_code import causal_in_compiled_code, products_in_own_kernels
from perfagent.probes.flops.op_formulas import Counted, count
from perfagent.probes.flops.op_settling import results_by_gradients, settle, settle_convolutions

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["StepFlops"]

MOST_SIZES = 8
STEADY_STEPS = 3
"""Steps for which the input must keep its shape before a step is counted: a framework may prefetch a batch or two."""


class StepFlops:
    """Computes the operations per second of each step, and their share of the device's peak.

    device: returns the index of this rank's device, or None. known: counts by size, those so far; some may be known
    before. seen: the shapes of the model's input.
    """

    def __init__(
        self, device: Callable[[], int | None], known: Mapping[Size, Counted] | None = None, *, seen: Inputs = inputs
    ) -> None:
        self._device, self._inputs = device, seen
        self.known: dict[Size, Counted] = dict(known or {})
        self._newest: tuple[int, Size | None] | None = None  # step and size
        self._shape: Shape | None = None
        self._changed = -STEADY_STEPS  # steps completed when the shape last changed
        self._wasted = 0  # recorded steps whose size did not become known
        self.running: FlopCount | None = None
        """The step that is being recorded: its size is set when its row is read."""
        self.kind = ""
        self.tells = True

    def wants(self) -> bool:
        """True if a step should be counted: none was yet, or the last step had a new size."""
        if not self.tells or self._newest is None:
            return False
        step, size = self._newest
        if size is None or size in self.known or len(self.known) >= MOST_SIZES or self._wasted >= MOST_SIZES:
            return False
        return bool(size[1]) or self._is_settled(step)

    def forget(self) -> None:
        """Drops all counts, since other parameters are trained now."""
        self.known.clear()
        self._wasted = 0
        self.tells = True

    def has_seen(self, step: int) -> bool:
        """True if the row of that step has been read."""
        return self._newest is not None and self._newest[0] >= step

    def take(self, look: FlopCount, model: nn.Module | None) -> None:
        """Takes the result of a recorded step, once the row of that step has been read. On the sender's thread."""
        size, self.running = look.size, None
        if look.failed:
            self.tells = False
            return
        # An optimizer that steps in hooks of gradients ends the step inside the backward pass: what was read until then
        # is 37 to 98 % of the step's operations, so there is no count.
        if size is None or look.broken_off:
            self._wasted += 1
            return  # the step was cut short, the shape of the input changed, or the step could not be recorded
        if True not in look.operators:
            return  # likewise: there was no backward pass
        counted = _counted(look)
        if counted.unknown or not counted.total:
            self.tells = False  # an incomplete count is no count
            return
        self.known[size] = counted
        self.kind = counted.kind or look.half or _type_of(model)
        vars(self).pop("_peak", None)

    def add(self, step: int, values: dict[str, float], samples: int, tokens: int, seconds: float) -> None:
        """Adds `flops_per_s` and `mfu` to a step's values."""
        flops = self.of(step, samples, tokens)
        if self.running is not None and self._newest is not None and step == self.running.step:
            self.running.size = self._newest[1] if tokens or self._is_settled(step) else None
        if flops is None or not seconds:
            return
        values["flops_per_s"] = flops / seconds
        if self._peak is not None and flops / seconds <= self._peak:  # above the peak, the assumed dtype must be wrong
            values["mfu"] = flops / seconds / self._peak

    def of(self, last: int, samples: int, tokens: int) -> float | None:
        """Returns the operations of each of some steps of one size; `last`: the newest of them."""
        shape = self._shape_until(last)
        size = (samples, tokens) if tokens else None if shape is None else (samples, 0, *shape)
        self._newest = last, size
        return None if size is None else self._flops(size)

    def _shape_until(self, last: int) -> Shape | None:
        """Returns the shape of a sample in the steps after the newest one, up to `last`; None if not known or changed."""
        changes, changed = self._inputs.changes, False
        while changes and changes[0][0] < last:
            completed, shape = changes.popleft()
            while changes and changes[0][0] == completed:  # the step fetched from several loaders: the last one counts
                _, shape = changes.popleft()
            if shape != self._shape and self._newest is not None:
                self._changed = completed
                changed = changed or completed > self._newest[0]
            self._shape = shape
        return None if changed else self._shape

    def _is_settled(self, step: int) -> bool:
        return step - self._changed >= STEADY_STEPS

    def _flops(self, size: Size) -> float | None:
        counted = self.known.get(size)
        if counted is not None:
            return counted.total
        alike = [one for one in self.known if one[0] and bool(one[1]) == bool(size[1]) and one[2:] == size[2:]]
        if not alike or not size[0]:
            return None
        near = min(alike, key=lambda known: abs(known[1] - size[1]) + abs(known[0] - size[0]))
        counted = self.known[near]
        samples = size[0] / near[0]
        grows = size[1] / near[1] if near[1] else samples
        return counted.products * grows + counted.attention * grows * (grows / samples)

    @functools.cached_property
    def _peak(self) -> float | None:
        """Operations a second of the device for the dtype; found once a count, since the search walks the model."""
        device = self._device()
        if device is None:
            return None
        tensor_cores = self.kind == "float32" and _multiplies_in_tf32()
        return peak_flops(accelerator().name(device), "tf32" if tensor_cores else self.kind)


def _multiplies_in_tf32() -> bool:
    """True if float32 matrices are multiplied in TF32. If that was set by its newer name, reading the older one raises."""
    matmul = sys.modules["torch"].backends.cuda.matmul
    try:
        return getattr(matmul, "fp32_precision", "") == "tf32" or bool(matmul.allow_tf32)
    except RuntimeError:
        return False


def _counted(look: FlopCount) -> Counted:
    """Returns the operations of all calls of a step together.

    Recomputation within the backward pass of compiled code is not marked: everything beyond twice the forward pass is
    taken for it. If weights are frozen, the count is too high by at most the recomputation.
    """
    causal: defaultdict[Shapes, bool | None] = defaultdict(causal_in_compiled_code if compiled() else bool)
    for backward in sorted(look.operators, reverse=True):  # what is checkpointed has its nodes in the backward pass
        settle(look.operators[backward], look.nodes, causal)
    by_gradients = results_by_gradients(look.operators[True])
    for operators in look.operators.values():
        settle_convolutions(operators, look.results, by_gradients)
    ways = {backward: count(one.ran, one.unknown) for backward, one in look.operators.items()}
    forward, behind = ways.get(False, Counted()), ways[True]
    by_type: dict[str, Counter[Op]] = {}
    for number, op in look.operators[True].passed:
        by_type.setdefault(look.types.get(number, ""), Counter())[op] += 1
    passed = {kind: count(ran) for kind, ran in by_type.items()}
    through = sum(passed.values(), Counted())
    kind = max(passed, key=lambda kind: passed[kind].total, default="") if 2 * through.total > forward.total else ""
    if through.total > forward.total:
        forward.products, forward.attention = through.products, through.attention
    if compiled() and forward.total:
        behind.products = min(behind.products, 2 * forward.products)
        behind.attention = min(behind.attention, 2 * forward.attention)
    if compiled() and products_in_own_kernels():
        behind.unknown.add("kernels of the compiler's own")
    return replace(forward + behind, kind=kind)


def _type_of(model: nn.Module | None) -> str:
    """Returns the dtype of most of the model's numbers, or that of a library's or FSDP2's mixed precision."""
    mixed = precision()
    if mixed or model is None:
        return mixed
    sizes: Counter[torch.dtype] = Counter()
    for module in model.modules():
        asked = getattr(type(module), "_get_fsdp_state", None)  # FSDP2 casts the parameters that it gathers
        policy = getattr(asked(module) if asked is not None else None, "_mp_policy", None)
        if policy is not None and policy.param_dtype is not None:
            return str(policy.param_dtype).removeprefix("torch.")
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.") if sizes else ""
