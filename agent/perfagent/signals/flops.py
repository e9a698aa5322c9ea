"""Floating-point operations of a training step, counted once for each size of step while the user's own step runs.

Torch's recording of operators (`RecordFunction`, through its light profiler) tells name and shapes of each operator without
changing which kernel runs: results stay equal bit by bit, compiled code stays compiled, and nothing runs twice. A dispatch mode
such as `FlopCounterMode` does neither: with one on, torch.compile falls back to eager, and some backward formulas take another
path. Its formulas for matrix products and convolutions are the ones used here (torch/utils/flop_counter.py).

What counts is the model's own arithmetic: 2 for a multiplication with its addition, matrix products, convolutions and attention,
forward and backward, in every call of the root model and every backward pass of one step. Not counted: what activation
checkpointing computes again, the attention scores that a fused backward computes again, elementwise work, the optimizer, and
models other than the root in their forward pass. Causal attention counts the pairs it needs, where its causality is known: in
eager code from the call of `scaled_dot_product_attention`, in compiled code from the code that inductor wrote. Operators whose
arithmetic does not follow from shapes (variable-length attention, recurrent kernels, other people's) make the count unknown.

A step of another size gets its own count, up to MOST_SIZES; until then, and beyond, a count is carried over to it: products and
convolutions grow with the tokens (or samples), attention with samples times length squared.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perfagent.hooks.guard import keep_out_of_frames, not_traced
from perfagent.hooks.progress import now
from perfagent.signals.peaks import peak_flops

if TYPE_CHECKING:
    from perfagent.hooks.progress import Progress

__all__ = ["Counted", "FlopCount", "StepFlops", "causal_share", "compiled", "count", "own_operations"]

MOST_SIZES = 8
Shape = Sequence[int]


@dataclass(slots=True)
class Counted:
    """Floating-point operations of one step. products: matrix products and convolutions; attention: fused attention.

    unknown: names of operators whose arithmetic cannot be told; the figures then say too little.
    """

    products: float = 0.0
    attention: float = 0.0
    recomputed: float = 0.0
    unknown: set[str] = field(default_factory=set)

    @property
    def total(self) -> float:
        return self.products + self.attention


class Op(NamedTuple):
    """One operator as torch recorded it. again: it belongs to the forward pass, and ran in backward."""

    name: str
    shapes: list[list[int]]
    again: bool


# ---- formulas


def _product(a: Shape, b: Shape) -> float:
    return 2.0 * a[0] * a[1] * b[1] if len(a) == len(b) == 2 else 2.0 * a[0] * a[1] * a[2] * b[2]


def _grouped(a: Shape, b: Shape) -> float:
    """Every row of a with one of the matrices in b."""
    if len(a) != 2 or len(b) != 3:
        raise ValueError("the sizes of the groups are not in the shapes")
    return 2.0 * a[0] * a[1] * b[2]


_PRODUCTS: dict[str, Callable[[list[list[int]]], float]] = {
    "aten::mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::bmm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::addmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_addmm_activation": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::baddbmm": lambda shapes: _product(shapes[1], shapes[2]),
    "aten::_scaled_mm": lambda shapes: _product(shapes[0], shapes[1]),
    "aten::_grouped_mm": lambda shapes: _grouped(shapes[0], shapes[1]),
}
_ATTENTION = re.compile(r"aten::_scaled_dot_product_(flash_attention|efficient_attention|cudnn_attention|fused_attention).*")
_UNKNOWN = re.compile(
    r"aten::(_flash_attention|_efficient_attention|_thnn_fused|_cudnn_rnn|miopen_rnn|mkldnn_rnn|_fft)\w*|(torch_attn|flash_attn\w*)::.*"
)


def _attention(query: Shape, key: Shape, value: Shape) -> float:
    """Scores and weighted values of one forward pass, all pairs of positions."""
    batch, heads, length, width = query
    return 2.0 * batch * heads * length * key[2] * (width + value[3])


def causal_share(length: int, keys: int) -> float:
    """Share of the pairs of positions that causal attention needs, its mask beginning at the upper left."""
    return sum(min(row + 1, keys) for row in range(length)) / (length * keys)


def _convolution(x: Shape, weight: Shape, out: Shape) -> float:
    """Transposed where the weight's first dimension is the input's channels."""
    spatial = x[2:] if weight[0] == x[1] != out[1] else out[2:]
    total = 2.0 * x[0]
    for size in (*spatial, *weight):
        total *= size
    return total


# ---- counting


def count(threads: Iterable[list[Any]], causal: dict[tuple[Any, Any], float], *, backward: bool) -> Counted:
    """What was recorded in one window, thread by thread.

    causal: (shape of the query, shape of the key) -> share of the pairs that are needed; absent: all.
    """
    counted = Counted()
    for events in threads:
        ops, last = _leaves(events, backward=backward)
        for place, op in enumerate(ops):
            try:
                _add(counted, op, ops[place + 1 :], causal, first_of_model=place == last)
            except (IndexError, ValueError):
                counted.unknown.add(op.name)
    return counted


def _leaves(events: list[Any], *, backward: bool) -> tuple[list[Op], int]:
    """The operators in order, without what lies inside of one that has a formula; and which of them is the convolution that the
    backward pass ends with, if it does: its input is the batch, which needs no gradient."""
    ops: list[Op] = []
    inside = 0  # depth below an operator that is counted as a whole
    last = -1
    for event in events:
        kind = event.kind()
        if kind == "pop":
            inside -= inside > 0
        elif kind == "push":
            if inside:
                inside += 1
                continue
            name = event.name()
            if name.startswith("autograd::engine::") and not name.endswith("AccumulateGrad"):
                last = -1
            whole = name in _PRODUCTS or name in _CONVOLUTIONS or _ATTENTION.fullmatch(name) or _UNKNOWN.fullmatch(name)
            inside = int(bool(whole))
            if name in _CONVOLUTIONS and name.endswith("_backward"):
                last = len(ops)
            again = backward and event.sequence_nr() >= 0 and event.scope() == 0
            ops.append(Op(name, event.shapes(), again))
    return ops, last


_CONVOLUTIONS = frozenset(("aten::convolution", "aten::convolution_backward", "aten::convolution_overrideable"))


def _add(counted: Counted, op: Op, later: list[Op], causal: dict[Any, float], *, first_of_model: bool) -> None:
    if op.name in _PRODUCTS:
        flops = _PRODUCTS[op.name](op.shapes)
        if op.again:
            counted.recomputed += flops
        else:
            counted.products += flops
    elif _ATTENTION.fullmatch(op.name):
        behind = op.name.endswith("_backward")
        query, key, value = op.shapes[1:4] if behind else op.shapes[:3]
        flops = _attention(query, key, value) * causal.get((tuple(query), tuple(key)), 1.0)
        if op.again:
            counted.recomputed += flops
        else:
            counted.attention += flops * (2 if behind else 1)
    elif op.name == "aten::convolution_backward":
        out, x, weight = op.shapes[:3]
        counted.products += _convolution(x, weight, out) * (1 if first_of_model else 2)
    elif op.name in _CONVOLUTIONS:
        x, weight = op.shapes[:2]
        flops = _convolution(x, weight, _result_of(x, weight, later))
        if op.again:
            counted.recomputed += flops
        else:
            counted.products += flops
    elif _UNKNOWN.fullmatch(op.name):
        counted.unknown.add(op.name)


def _result_of(x: Shape, weight: Shape, later: list[Op]) -> list[int]:
    """The shape of a convolution's result, which was not recorded: the next operator that takes something of its kind."""
    for op in later[:32]:
        for shape in op.shapes:
            if len(shape) == len(x) and shape[0] == x[0] and shape[1] in (weight[0], weight[1]) and shape != x:
                return shape
            if len(shape) == len(x) and list(shape) == list(x) and weight[0] == x[1]:
                return shape
    raise ValueError("nothing takes its result")


# ---- one step, recorded


class FlopCount:
    """Records one step: a task between two steps (rootcause/investigator.py), and the probe of the root model's calls.

    windows: (events by thread, whether of a backward pass) of each call, once the step is over.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.step = 0
        self.size: tuple[int, int] | None = None
        self.windows: list[tuple[list[list[Any]], bool]] = []
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = []  # of scaled_dot_product_attention: shapes, causal
        self.half: str | None = None
        self.over = False
        self.cost_ns = 0
        self._undo: Callable[[], None] | None = None

    def at_boundary(self) -> bool:
        """Begins at the end of one step, ends at the end of the next."""
        if self._undo is not None:
            self.close()
            return False
        p = self._progress
        if p.probe is not None or sys.modules["torch"].autograd._profiler_enabled():
            self.over = True
            return False
        self.step = p.completed + 1
        p.probe = self
        self._watch_backward()
        return True

    def close(self) -> None:
        """Takes everything out again; from here on the windows can be read by another thread."""
        if self._undo is not None:
            self._undo()
        if self._progress.probe is self:
            self._progress.probe = None
        self.over = True

    def _watch_backward(self) -> None:
        autograd: Any = sys.modules["torch.autograd"]
        original = autograd.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._progress.backward_depth:
                return original(*args, **kwargs)
            return self._recorded(original, args, kwargs, backward=True)

        autograd.backward = not_traced(backward)
        keep_out_of_frames()

        def undo() -> None:
            if autograd.backward is backward:
                autograd.backward = original
            self._undo = None

        self._undo = undo

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of the root model, recorded."""
        functional: Any = sys.modules["torch.nn.functional"]
        attention = functional.scaled_dot_product_attention
        if compiled():
            return self._recorded(call, args, kwargs, backward=False)
        functional.scaled_dot_product_attention = self._noting(attention)
        try:
            return self._recorded(call, args, kwargs, backward=False)
        finally:
            functional.scaled_dot_product_attention = attention

    def _noting(self, attention: Callable[..., Any]) -> Callable[..., Any]:
        def scaled_dot_product_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            causal = kwargs.get("is_causal", args[2] if len(args) > 2 else False)
            self.calls.append((tuple(query.shape), tuple(key.shape), bool(causal)))
            return attention(query, key, value, *args, **kwargs)

        return scaled_dot_product_attention

    def _recorded(self, function: Callable[..., Any], args: Any, kwargs: Any, *, backward: bool) -> Any:
        torch = sys.modules["torch"]
        p = self._progress
        began = now()
        recording = self.over is False and p.completed < self.step and not torch.autograd._profiler_enabled()
        if recording:
            if not backward:
                self.half = self.half or _autocast(torch)
            profiler = torch._C._profiler
            config = profiler.ProfilerConfig(
                profiler.ProfilerState.CPU, True, False, False, False, False, profiler._ExperimentalConfig()
            )
            torch._C._autograd._enable_profiler_legacy(config)
        self.cost_ns += now() - began
        try:
            return function(*args, **kwargs)
        finally:
            if recording:
                began = now()
                self.windows.append((torch._C._autograd._disable_profiler_legacy(), backward))
                if not backward and not self.over:
                    p.probe = self  # the next micro-step's call too
                self.cost_ns += now() - began


for _between in (FlopCount.call, FlopCount._recorded):
    not_traced(_between)  # where a model was compiled after its first steps, we lie inside of what torch.compile traces


def _autocast(torch: Any) -> str | None:
    """The type that autocast multiplies in, where it is on."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    used = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in used.values())


_FUSED = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?")
_CAUSAL_AT = {"flash": 4, "efficient": 6, "cudnn": 6}
"""Which argument says whether attention is causal."""


def causal_in_compiled_code() -> bool | None:
    """Whether all fused attention in what inductor wrote is causal; None where there is none, or some is and some is not."""
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    said: set[bool] = set()
    for module in list(getattr(cache, "modules", [])):
        try:
            source = Path(module.__file__).read_text("utf-8")
        except (OSError, AttributeError, TypeError, ValueError):
            continue
        if "_scaled_dot_product_" in source:
            said |= _causal_calls(source)
    return said.pop() if len(said) == 1 else None


def _causal_calls(source: str) -> set[bool]:
    """What the calls `torch.ops.aten._scaled_dot_product_..._attention.default(...)` of a module say about causality."""
    said = set()
    for node in ast.walk(ast.parse(source)):
        function = node.func if isinstance(node, ast.Call) else None
        named = function.value if isinstance(function, ast.Attribute) and function.attr == "default" else None
        match = _FUSED.fullmatch(named.attr) if isinstance(named, ast.Attribute) else None
        if match is not None and isinstance(node, ast.Call):
            place = _CAUSAL_AT[match[1]]
            argument = node.args[place] if len(node.args) > place else None
            said.add(isinstance(argument, ast.Constant) and argument.value is True)
    return said


# ---- what becomes of it, on the sender's thread


class StepFlops:
    """Operations per second of each step, and their share of what the device can do.

    device: index of this rank's CUDA device, or None. Sizes are (samples, tokens) of a whole step.
    """

    def __init__(self, device: Callable[[], int | None]) -> None:
        self._device = device
        self._known: dict[tuple[int, int], Counted] = {}
        self._newest: tuple[int, tuple[int, int]] | None = None  # step and size
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
        return self._newest[1] not in self._known and len(self._known) < MOST_SIZES

    def has_seen(self, step: int) -> bool:
        """Whether the row of that step has been here."""
        return self._newest is not None and self._newest[0] >= step

    def take(self, look: FlopCount, model: Any) -> None:
        """The result of a step that was recorded, once the row of that step has been here."""
        size, self.look = look.size, None
        counted = own_operations(look, _causal_shares(look), model)
        if size is None or not any(backward for _, backward in look.windows):
            return  # the step was cut short
        if counted.unknown or not counted.total:
            self.tells = False  # a share of what there is to count is no count
            return
        self._known[size] = counted
        self.kind = look.half or _type_of(model)
        self._asked = False

    def add(self, step: int, values: dict[str, float], samples: int, tokens: int, seconds: float) -> None:
        """What a step's row says of it."""
        if self.look is not None and step == self.look.step:
            self.look.size = samples, tokens
        flops = self.of(step, samples, tokens)
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
        self._newest = last, (samples, tokens)
        return self._flops((samples, tokens))

    def _flops(self, size: tuple[int, int]) -> float | None:
        counted = self._known.get(size)
        if counted is not None:
            return counted.total
        if not self._known or not size[0]:
            return None
        near, counted = min(self._known.items(), key=lambda item: abs(item[0][1] - size[1]) + abs(item[0][0] - size[0]))
        if not near[0] or bool(near[1]) != bool(size[1]):
            return None
        samples = size[0] / near[0]
        grows = size[1] / near[1] if near[1] else samples
        return counted.products * grows + counted.attention * grows * (grows / samples)

    def _peak_flops(self) -> float | None:
        if not self._asked:
            self._asked, self._peak = True, None
            device, torch = self._device(), sys.modules["torch"]
            if device is not None:
                tensor_cores = self.kind == "float32" and torch.backends.cuda.matmul.allow_tf32
                self._peak = peak_flops(torch.cuda.get_device_name(device), "tf32" if tensor_cores else self.kind)
        return self._peak


def own_operations(look: FlopCount, causal: dict[tuple[Any, Any], float], model: Any) -> Counted:
    """All windows of a step together.

    What compiled code computes again in its backward pass bears no mark. Where blocks are checkpointed, what goes beyond twice
    the forward pass is taken for it: exact where every product needs both gradients, too much by at most what is computed again
    where weights are frozen.
    """
    ways = {False: Counted(), True: Counted()}
    for threads, backward in look.windows:
        part, counted = count(threads, causal, backward=backward), ways[backward]
        counted.products += part.products
        counted.attention += part.attention
        counted.recomputed += part.recomputed
        counted.unknown |= part.unknown
    forward, behind = ways[False], ways[True]
    products, attention = behind.products, behind.attention
    if compiled() and _checkpoints(model):
        products, attention = min(products, 2 * forward.products), min(attention, 2 * forward.attention)
    return Counted(
        forward.products + products,
        forward.attention + attention,
        forward.recomputed + behind.recomputed + behind.total - products - attention,
        forward.unknown | behind.unknown,
    )


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
    shares: dict[tuple[Any, Any], list[float]] = {}
    for query, key, causal in look.calls:
        shares.setdefault((query, key), []).append(causal_share(query[-2], key[-2]) if causal else 1.0)
    if not look.calls and causal_in_compiled_code():
        for threads, _ in look.windows:
            for event in (event for events in threads for event in events if event.kind() == "push"):
                if _ATTENTION.fullmatch(event.name()):
                    query, key = event.shapes()[1:3] if event.name().endswith("_backward") else event.shapes()[:2]
                    shares[tuple(query), tuple(key)] = [causal_share(query[-2], key[-2])]
    return {shapes: sum(each) / len(each) for shapes, each in shares.items()}


def _type_of(model: Any) -> str:
    """The type of most of the model's numbers; Accelerate's mixed precision where that is on, since it hides in the model."""
    shared = getattr(getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), "_shared_state", {})
    mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(str(shared.get("_mixed_precision", "")))
    if mixed is not None or model is None:
        return mixed or ""
    for module in model.modules():  # FSDP2 casts what it gathers
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        policy = getattr(state, "_mp_policy", None)
        if policy is not None and policy.param_dtype is not None:
            return str(policy.param_dtype).removeprefix("torch.")
    sizes: dict[str, int] = {}
    for parameter in model.parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        sizes[kind] = sizes.get(kind, 0) + parameter.numel()
    return max(sizes, key=sizes.__getitem__) if sizes else ""
