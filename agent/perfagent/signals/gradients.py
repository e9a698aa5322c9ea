"""Computes the norms of the gradients, of each parameter and of all together, in one pass over them.

A single `torch._foreach_norm` reads every gradient once (2 launches where a loop over parameters needs 1,500;
foreach_norms.py). A 2-norm that is not finite *is* the check for NaN and Inf; a norm of zero is the check for a
parameter that no gradient reaches. (The squares are float32: for numbers above 1.8e19 the norm is Inf, for numbers all
below 1e-22 it is zero.) The norms stay on the device until the sender's thread reads them. No collective is issued: for
sharded parameters each rank sends the squares of its shards, which the server adds up (sharding.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from perfagent.device import Reading, collect, is_captured, ran_out_of_memory
from perfagent.signals.foreach_norms import Order, norms_of
from perfagent.signals.layers import Layers, names_in, names_of
from perfagent.signals.sharding import held, local, world_size
from perfagent.signals.tensor_storage import numbers_in

if TYPE_CHECKING:
    import torch

__all__ = [
    "MOST_SUSPECTS", "VANISHING_RMS", "GradientNorms", "Plan", "Report", "joint_plan", "joint_report", "named",
    "norms", "parameters_of",
]  # fmt: skip

VANISHING_RMS = 1e-7
"""Root mean square of a parameter's gradient below which it no longer trains: SageMaker's VanishingGradient, which uses
the mean of the absolute values (never above the root mean square)."""
MOST_SUSPECTS = 32
"""Most parameters whose NaN and Inf are counted; each count is a pass of its own."""


class Plan:
    """What is known about an optimizer's parameters before a pass: names, layers, sizes. Holds no parameter.

    world: number of ranks of the job.
    sharded: other ranks hold parts of these parameters.
    copies: for each parameter, how many ranks hold the same part; together: how many hold all that is not sharded. None
        if not known.
    uniform: all are plain tensors of one device and dtype; dtype: that of the norms then.
    same_everywhere: every rank has the same gradients (DDP).
    faint: for each parameter, the norm below which its gradient vanishes.
    titles: names of the layers' series, once they were reported.
    """

    __slots__ = (
        "_kind", "_order", "_shapes", "copies", "dtype", "faint", "ids", "layers", "names", "same_everywhere", "sharded", "sizes",
        "titles", "together", "uniform", "world",
    )  # fmt: skip

    def __init__(self, parameters: Sequence[Any], names: Sequence[str], model: Any) -> None:
        torch = sys.modules["torch"]
        self.ids = list(map(id, parameters))
        self._kind = _kind(parameters)
        self.names = list(names)
        self.layers = Layers(names)
        self.titles: tuple[str, ...] | None = None
        self.sizes = list(map(numbers_in, parameters))
        self.faint = _faint(self.sizes)
        self.world = world_size()
        sharded = held(parameters, self.world, model)
        self.sharded = sharded is not None
        self.copies = None if sharded is None else sharded.copies
        self.together = None if sharded is None else sharded.together
        plain = {torch.Tensor, torch.nn.Parameter}
        self.uniform = len({(p.device, p.dtype) for p in parameters}) == 1 and plain.issuperset(map(type, parameters))
        self.dtype = _norm_dtype(parameters[0].dtype) if self.uniform else None
        self._shapes = [tuple(p.shape) for p in parameters] if self.uniform and parameters[0].is_cpu else None
        self._order: Order | None = None
        self.same_everywhere = type(model).__name__ == "DistributedDataParallel"

    @classmethod
    def of(cls, optimizer: Any, model: Any) -> Plan:
        """Makes the plan of all parameters of an optimizer, named as in the model (None if not known)."""
        return cls(parameters_of(optimizer), names_of(optimizer, model), model)

    @classmethod
    def of_pieces(cls, pieces: Sequence[tuple[Any, Any]], model: Any) -> Plan:
        """Makes the plan of (parameter, shard of its gradient) pairs that only this rank holds."""
        parameters = [parameter for parameter, _ in pieces]
        names, every_name = names_in(model, parameters)
        plan = cls(parameters, names, None)
        plan.layers = Layers(names, among=every_name)
        plan.sharded, plan.copies, plan.together = True, [1.0] * len(pieces), plan.world
        plan.sizes = [int(piece.numel()) for _, piece in pieces]
        plan.faint = _faint(plan.sizes)
        plan.uniform = False
        return plan

    @classmethod
    def joint(cls, plans: Sequence[Plan]) -> Plan:
        """Makes a joint plan of several optimizers, one after another: for reports, not for measuring."""
        plan = cls.__new__(cls)
        plan.ids = [*chain.from_iterable(one.ids for one in plans)]
        plan.sizes = [*chain.from_iterable(one.sizes for one in plans)]
        plan.faint = _faint(plan.sizes)
        plan.names = _apart([one.names for one in plans])
        plan.layers, plan.titles = Layers(plan.names), None
        plan.world = plans[0].world
        plan.sharded = any(one.sharded for one in plans)
        plan.copies, plan.together = _joint_copies(plans) if plan.sharded else (None, None)
        plan.same_everywhere = all(one.same_everywhere for one in plans)
        return plan

    def fits(self, parameters: Sequence[Any]) -> bool:
        """True if these are the plan's parameters. `model.half()` keeps the objects but changes their dtype."""
        return (
            len(parameters) == len(self.ids)
            and list(map(id, parameters)) == self.ids
            and _kind(parameters) == self._kind
        )

    def order(self, places: list[int]) -> Order:
        """Returns the order in which these norms are taken; kept until other parameters have a gradient."""
        if self._order is None or self._order.of != places:
            self._order = Order(places, self._shapes)
        return self._order


def _joint_copies(plans: Sequence[Plan]) -> tuple[list[float] | None, int | None]:
    """Returns (copies, together) of several plans, some of sharded parameters: all ranks hold the
    parameters of the others."""
    known = {one.together for one in plans if one.sharded}
    together = known.pop() if len(known) == 1 else None
    if together is None:
        return None, None
    copies: list[float] = []
    for one in plans:
        copies += one.copies or [float(together)] * len(one.ids)
    return copies, together


def _apart(lists: Sequence[Sequence[str]]) -> list[str]:
    """Returns all names. A name in an earlier list (of parameters that no model names) gets its optimizer's number."""
    names: list[str] = []
    for number, each in enumerate(lists):
        earlier = set(names)
        names += [f"optimizer{number}.{name}" if name in earlier else name for name in each]
    return names


def _kind(parameters: Sequence[Any]) -> tuple[Any, Any] | None:
    return (parameters[0].dtype, parameters[0].device) if parameters else None


class Report:
    """The results of a pass, read on the sender's thread.

    square_sum: of all gradients that this rank accounts for (for a sharded model, its share); None if the number of
        copies is not known.
    nonfinite: places of the parameters whose gradient holds NaN or Inf.
    shares: series name -> of the parameters with a gradient, the share whose gradient is all zero, and the share below
        VANISHING_RMS but not zero.
    layers: for each layer the sum of squares; None if none of its parameters has a gradient.
    counts: for some parameters, by place, how many numbers of the gradient are NaN or Inf.
    """

    __slots__ = ("counts", "layers", "nonfinite", "plan", "sharded", "shares", "square_sum")

    def __init__(
        self, each: list[float | None], plan: Plan | None, sizes: Sequence[int], *, sharded: bool, scale: float
    ) -> None:
        self.plan, self.sharded = plan, sharded
        self.counts: dict[int, float] = {}
        if scale != 1.0:
            each = _unscaled(each, scale)
        present = [norm for norm in each if norm is not None]
        self.nonfinite = [] if math.isfinite(sum(present)) else _nonfinite(each)
        squares = [None if norm is None else norm * norm for norm in each]
        copies = plan.copies if plan is not None else None
        if copies is not None:
            squares = [None if square is None else square / n for square, n in zip(squares, copies, strict=True)]
        known = not sharded or copies is not None
        self.square_sum = _sum([square for square in squares if square is not None]) if known else None
        self.shares = _shares(each, plan.faint if plan is not None else _faint(sizes))
        self.layers = _by_layer(squares, plan.layers) if plan is not None and known else []


def _unscaled(each: list[float | None], scale: float) -> list[float | None]:
    """Divides the norms by the loss scale, as the optimizer does: by a scale that collapsed to zero,
    nothing stays finite."""
    return [None if norm is None else norm / scale if scale else norm * math.inf for norm in each]


def _nonfinite(each: list[float | None]) -> list[int]:
    return [place for place, norm in enumerate(each) if norm is not None and not math.isfinite(norm)]


def _sum(squares: list[float]) -> float:
    """Sums squares, which are never negative. fsum raises on an overflow, or if infinities of both signs meet."""
    total = sum(squares)
    return math.fsum(squares) if math.isfinite(total) else total


def _faint(sizes: Sequence[int]) -> list[float]:
    """Returns for each gradient the norm below which it vanishes; zero for one without numbers, which never does."""
    return [VANISHING_RMS * math.sqrt(size) for size in sizes]


def _shares(each: list[float | None], faint: list[float]) -> dict[str, float]:
    alive = below = zero = 0
    for norm, limit in zip(each, faint, strict=True):
        if norm is None or not limit:
            continue
        alive += 1
        if norm < limit:  # true for few
            below += 1
            zero += norm == 0.0
    return {"grad/zero_share": zero / alive, "grad/vanishing_share": (below - zero) / alive} if alive else {}


def _by_layer(squares: list[float | None], layers: Layers) -> list[float | None]:
    if len(layers.names) == len(squares):  # each parameter is a layer
        return squares
    sums: list[float | None] = [None] * len(layers.names)
    for place, square in zip(layers.of, squares, strict=True):
        if square is not None:
            sums[place] = (sums[place] or 0.0) + square
    return sums


class GradientNorms:
    """The norms of one pass, perhaps still on the device.

    plan: names and layers; None for gradients without names.
    sharded: other ranks hold the rest.
    readings: values, and the places of their parameters.
    """

    __slots__ = ("_counts", "_plan", "_readings", "_sizes", "_suspects", "sharded")

    def __init__(
        self,
        readings: Sequence[tuple[Reading, Sequence[int]]],
        sizes: Sequence[int],
        plan: Plan | None,
        *,
        sharded: bool,
    ) -> None:
        self._readings, self._sizes, self._plan, self.sharded = readings, sizes, plan, sharded
        self._counts: Reading | None = None
        self._suspects: Sequence[int] = ()

    def ready(self) -> bool:
        return all(reading.ready() for reading, _ in self._readings) and (self._counts is None or self._counts.ready())

    def count_numbers(self, gradients: Sequence[Any], suspects: Sequence[int]) -> None:
        """Also counts NaN and Inf within some gradients: only in the few bad ones, since each takes a pass
        and a mask."""
        torch = sys.modules["torch"]
        suspects = [place for place in suspects if place < len(gradients) and gradients[place] is not None][
            :MOST_SUSPECTS
        ]
        if not suspects:
            return
        with torch.no_grad():
            parts = [_values(local(gradients[place])) for place in suspects]
            device = parts[0].device
            counts = [torch.isfinite(part).logical_not_().sum() for part in parts if part.device == device]
            if len(counts) == len(parts):
                self._counts, self._suspects = collect(torch.stack(counts)), suspects

    def bad_on_host(self) -> list[int]:
        """Returns the places of gradients that hold NaN or Inf, if the norms are already in host memory."""
        here = [(reading.values(), places) for reading, places in self._readings if reading.on_host]
        return [
            place
            for values, places in here
            for value, place in zip(values, places, strict=True)
            if not math.isfinite(value)
        ]

    def report(self, scale: float = 1.0) -> Report:
        """Returns the results. Called once, when ready. scale: a factor that the gradients still carried."""
        report = Report(self._each(), self._plan, self._sizes, sharded=self.sharded, scale=scale)
        self._add_counts(report)
        return report

    def _each(self) -> list[float | None]:
        """Returns the norm of each gradient, by place."""
        each: list[float | None] = [None] * len(self._sizes)
        for reading, places in self._readings:
            for place, value in zip(places, reading.values(), strict=True):
                each[place] = value
        return each

    def _add_counts(self, report: Report) -> None:
        if self._counts is not None:
            report.counts = dict(zip(self._suspects, self._counts.values(), strict=True))


_joint: dict[tuple[int, ...], tuple[Sequence[Plan], Plan]] = {}
"""ids of some plans -> those plans, and the joint plan."""


def joint_report(parts: Sequence[tuple[GradientNorms, float]]) -> Report:
    """Combines passes over the gradients of several optimizers, each with its scale. Called once, when all are ready.
    The counts of NaN and Inf are those of the first pass."""
    each: list[float | None] = []
    for norms_, scale in parts:
        each += _unscaled(norms_._each(), scale)
    plans = [norms_._plan for norms_, _ in parts if norms_._plan is not None]
    plan = joint_plan(plans) if len(plans) == len(parts) else None
    sizes = [*chain.from_iterable(norms_._sizes for norms_, _ in parts)]
    report = Report(each, plan, sizes, sharded=any(norms_.sharded for norms_, _ in parts), scale=1.0)
    parts[0][0]._add_counts(report)
    return report


def named(norm: float | None, nonfinite: int | None) -> dict[str, float]:
    """Returns the series of a step that describe all gradients together.

    norm: None if this rank does not know it. nonfinite: how many parameters have NaN or Inf; None if they were not
    counted. A finite norm says that there are none.
    """
    values: dict[str, float] = {}
    if norm is not None:
        values["grad/norm"] = norm
        if nonfinite is None and math.isfinite(norm):
            nonfinite = 0
    if nonfinite is not None:
        values["grad/nonfinite"] = float(nonfinite)
    return values


def joint_plan(plans: Sequence[Plan]) -> Plan:
    """Returns the joint plan of these plans, in their order; kept, since optimizers stay together."""
    key = tuple(map(id, plans))
    known = _joint.get(key)
    if known is None:
        if len(_joint) > 16:  # optimizers that come and go
            _joint.clear()
        known = _joint[key] = plans, Plan.joint(plans)
    return known[1]


def parameters_of(optimizer: Any) -> list[Any]:
    """Returns all parameters of an optimizer, in its order."""
    return list(chain.from_iterable([group["params"] for group in optimizer.param_groups]))


def norms(gradients: Iterable[torch.Tensor | None], plan: Plan | None = None) -> GradientNorms | None:
    """Makes one pass over the gradients. Returns None if there are none, or if they cannot be read without waiting.

    plan: of their parameters; the gradients may then have gaps (None).
    """
    torch = sys.modules["torch"]
    listed = list(gradients)
    places = [place for place, gradient in enumerate(listed) if gradient is not None]
    if not places or is_captured(listed[places[0]]):
        return None
    if plan is not None and plan.uniform:
        found = _uniform(torch, listed, places, plan)
        if found is not None:
            return found
        plan.uniform = False
    parts: dict[int, Any] = {}
    sharded = plan is not None and plan.sharded
    for place in places:
        gradient: Any = listed[place]
        if hasattr(gradient, "_local_tensor"):  # FSDP2 and tensor parallel: this rank's shard
            sharded = True
        part = _values(local(gradient))
        if part.numel():
            parts[place] = part
    readings = []
    with torch.no_grad():
        for together in _alike(parts).values():
            same = [parts[place] for place in together]
            reading = collect(norms_of(same, _norm_dtype(same[0].dtype)))
            if reading is None:
                return None
            readings.append((reading, together))
    sizes = (
        plan.sizes
        if plan is not None
        else [parts[place].numel() if place in parts else 0 for place in range(len(listed))]
    )
    return GradientNorms(readings, sizes, plan, sharded=sharded) if readings else None


def _uniform(torch: Any, gradients: list[Any], places: list[int], plan: Plan) -> GradientNorms | None:
    """Makes the pass over plain tensors of one device and dtype, as in nearly every model, without
    checking each of them."""
    order = plan.order(places)
    try:
        with torch.no_grad():
            reading = collect(order.norms(gradients, plan.dtype))
    except (RuntimeError, NotImplementedError, TypeError) as error:  # a sparse gradient, or one unlike its parameter
        if ran_out_of_memory(error):
            raise
        return None
    return None if reading is None else GradientNorms([(reading, order.places)], plan.sizes, plan, sharded=plan.sharded)


def _norm_dtype(dtype: Any) -> Any:
    """Returns the dtype for the norms of such gradients: in half precision a norm would overflow at 65504 and
    round to 8 bits."""
    torch = sys.modules["torch"]
    return torch.float32 if dtype in (torch.float16, torch.bfloat16, torch.float32) else None


def _values(tensor: Any) -> Any:
    """Returns the numbers of a gradient; duplicates in a sparse one are added up."""
    return tensor if tensor.layout is sys.modules["torch"].strided else tensor.coalesce().values()


def _alike(tensors: dict[int, Any]) -> dict[tuple[Any, Any], list[int]]:
    """Groups places by device and dtype, as the fast path of the foreach kernels needs them."""
    groups: dict[tuple[Any, Any], list[int]] = {}
    for place, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    return groups
