"""Computes the norms of the gradients, of each parameter and of all together, in one pass over them.

A single `torch._foreach_norm` reads every gradient once (2 launches where a loop over parameters needs 1,500). A 2-norm
that is not finite *is* the check for NaN and Inf; a norm of zero is the check for a parameter that no gradient reaches.
(The squares are float32: for numbers above 1.8e19 the norm is Inf, for numbers all below 1e-22 it is zero, and for a
tensor of 60 million numbers on the CPU it is up to 0.5 % too low, as that of torch's own clipping.) The norms stay on the
device until the sender's thread reads them. No collective is issued: for sharded parameters each rank sends the squares
of its shards, which the server adds up (sharding.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from perfagent.device import is_captured, ran_out_of_memory, read_later
from perfagent.measure.parameter_names import names_in, names_of
from perfagent.measure.sharding import UNKNOWN, held, local, world_size
from perfagent.measure.tensor_storage import numbers_in
from perfagent.step.gradients import GradientNorms, ParameterTable

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Plan", "bad_on_host", "count_nonfinite", "norms", "parameters_of"]

_MOST_SUSPECTS = 32
"""Most parameters whose NaN and Inf are counted; each count is a pass of its own."""


class Plan(ParameterTable):
    """Facts of an optimizer's parameters from before a pass. Holds no parameter.

    uniform: all are plain tensors of one device and dtype; dtype: that of the norms then. tables: ids of those of embeddings.
    """

    __slots__ = ("_kind", "dtype", "ids", "tables", "uniform")

    def __init__(
        self, parameters: Sequence[torch.Tensor], names: Sequence[str], model: nn.Module | None = None
    ) -> None:
        torch = sys.modules["torch"]
        world = world_size()
        shards = held(parameters, world, model)
        copies, together = shards or UNKNOWN
        super().__init__(
            names=names,
            sizes=list(map(numbers_in, parameters)),
            world=world,
            sharded=shards is not None,
            copies=copies,
            together=together,
            same_everywhere=type(model).__name__ == "DistributedDataParallel",
        )
        self.ids = list(map(id, parameters))
        self._kind = _kind(parameters)
        embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        modules = () if model is None else model.modules()
        self.tables = frozenset(id(one.weight) for one in modules if isinstance(one, embeddings))
        plain = {torch.Tensor, torch.nn.Parameter}
        self.uniform = len({(p.device, p.dtype) for p in parameters}) == 1 and plain.issuperset(map(type, parameters))
        self.dtype = _norm_dtype(parameters[0].dtype) if self.uniform else None

    @classmethod
    def of(cls, optimizer: Optimizer, model: nn.Module | None) -> Plan:
        """Makes the plan of all parameters of an optimizer, named as in the model (None if not known)."""
        return cls(parameters_of(optimizer), names_of(optimizer, model), model)

    @classmethod
    def of_pieces(cls, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], model: nn.Module) -> Plan:
        """Makes the plan of (parameter, shard of its gradient) pairs that only this rank holds."""
        parameters = [parameter for parameter, _ in pieces]
        names, every_name = names_in(model, parameters)
        plan = cls(parameters, names)
        plan.among = every_name
        plan.sharded, plan.copies, plan.together = True, [1.0] * len(pieces), plan.world
        plan.sizes = [int(piece.numel()) for _, piece in pieces]
        plan.uniform = False
        return plan

    def fits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """True if these are the plan's parameters. `model.half()` keeps the objects but changes their dtype."""
        return list(map(id, parameters)) == self.ids and _kind(parameters) == self._kind


def _kind(parameters: Sequence[torch.Tensor]) -> tuple[torch.dtype, torch.device] | None:
    return (parameters[0].dtype, parameters[0].device) if parameters else None


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns all parameters of an optimizer, in its order."""
    return list(chain.from_iterable([group["params"] for group in optimizer.param_groups]))


def norms(gradients: Iterable[torch.Tensor | None], plan: Plan) -> GradientNorms | None:
    """Makes one pass over the gradients of the plan's parameters, which may have gaps (None). Returns None if there are
    none, or if they cannot be read without waiting."""
    listed = list(gradients)
    places = [place for place, gradient in enumerate(listed) if gradient is not None]
    if not places or is_captured(listed[places[0]]):
        return None
    if plan.uniform:
        found = _uniform([listed[place] for place in places], places, plan)
        if found is not None:
            return found
        plan.uniform = False
    parts = {place: _values(local(listed[place])) for place in places}
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}  # as the fast path of the foreach kernels needs them
    for place, part in parts.items():
        if part.numel():
            groups.setdefault((part.device, part.dtype), []).append(place)
    readings = []
    with sys.modules["torch"].no_grad():
        for (_, dtype), together in groups.items():
            reading = read_later(_norms_of([parts[place] for place in together], _norm_dtype(dtype)))
            if reading is None:
                return None
            readings.append((reading, together))
    # FSDP2 and tensor parallel: this rank's shard
    sharded = plan.sharded or any(hasattr(listed[place], "_local_tensor") for place in places)
    return GradientNorms(readings, plan, sharded) if readings else None


def _uniform(present: Sequence[Any], places: list[int], plan: Plan) -> GradientNorms | None:
    """Makes the pass over plain tensors of one device and dtype, as in nearly every model, unchecked."""
    try:
        with sys.modules["torch"].no_grad():
            reading = read_later(_norms_of(present, plan.dtype))
    except (RuntimeError, NotImplementedError, TypeError) as error:  # a sparse gradient, or one unlike its parameter
        if ran_out_of_memory(error):
            raise
        return None
    return None if reading is None else GradientNorms([(reading, places)], plan, plan.sharded)


def _norms_of(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> torch.Tensor:
    """Returns the 2-norms of tensors of one device and type, as one tensor of that dtype (None: their own)."""
    torch = sys.modules["torch"]
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))  # type: ignore[no-any-return]


def count_nonfinite(found: GradientNorms, gradients: Sequence[torch.Tensor | None], suspects: Sequence[int]) -> None:
    """Also counts NaN and Inf within some gradients: only in the few bad ones, since each takes a pass and a mask."""
    torch = sys.modules["torch"]
    suspects = [place for place in suspects if place < len(gradients) and gradients[place] is not None][:_MOST_SUSPECTS]
    with torch.no_grad():
        parts = [_values(local(gradients[place])) for place in suspects]
        if len({part.device for part in parts}) == 1:
            counts = torch.stack([torch.isfinite(part).logical_not_().sum() for part in parts])
            found.counts, found.suspects = read_later(counts), suspects


def bad_on_host(found: GradientNorms) -> list[int]:
    """Returns the places of gradients that hold NaN or Inf, if the norms are already in host memory."""
    here = [(reading.values(), places) for reading, places in found.readings if reading.on_host]
    pairs = [pair for values, places in here for pair in zip(values, places, strict=True)]
    return [place for value, place in pairs if not math.isfinite(value)]


def _norm_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Returns the dtype for the norms of such gradients: in half precision a norm would overflow at 65504."""
    kinds = sys.modules["torch"]
    return kinds.float32 if dtype in (kinds.float16, kinds.bfloat16, kinds.float32) else None


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of a gradient; duplicates in a sparse one are added up."""
    return tensor if tensor.layout is sys.modules["torch"].strided else tensor.coalesce().values()
