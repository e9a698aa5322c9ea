"""Keeps a few numbers of a step whose loss has not come from its device before the update: should that turn out to be NaN,
nothing else of the step is left by then.

The host is ahead of the device there, and has time; the device gets two small kernels. They take the largest magnitude of
the gradients of a few small parameters, spread over the model, and the range of what the model was called with.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perfagent.device import Reading, read_later, tolerating_out_of_memory
from perfagent.measure.gradients import parameters_of
from perfagent.measure.parameter_names import names_of
from perfagent.step.gradients import Witnessed
from perfagent.wire.evidence import BatchTensor

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from perfagent.step.state import StepState

__all__ = ["StepWitness", "inputs_of"]

_MOST_PARAMETERS = 16
_MOST_OF_ONE = 2**14
_MOST_OF_INPUTS = 2**26
"""Numbers of a parameter, and of an input: 0.1 ms of a GPU's time."""


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, weakref.ref[torch.Tensor]]:
    """Arguments of a model's call that may hold NaN, by place or name. Keeps nothing alive."""
    tensor = sys.modules["torch"].Tensor
    return {
        str(name): weakref.ref(value)
        for name, value in (*enumerate(args), *kwargs.items())
        if type(value) is tensor and value.is_floating_point()
    }


class StepWitness:
    """The numbers of one run."""

    def __init__(self, p: StepState) -> None:
        self._progress = p
        self._of = 0
        self._step = -1
        self._parameters: dict[str, weakref.ref[torch.Tensor]] = {}

    def measure(self) -> None:
        """On the training thread, before gradients or weights change."""
        p = self._progress
        optimizer = p.selection.primary
        if optimizer is None or self._step == p.completed:
            return
        began, self._step = time.perf_counter_ns(), p.completed
        torch = sys.modules["torch"]
        if self._of != id(optimizer):
            self._of, self._parameters = id(optimizer), _spread(optimizer, p.selection.model)
        with torch.no_grad(), tolerating_out_of_memory():
            known: dict[str, Any] = {name: getattr(kept(), "grad", None) for name, kept in self._parameters.items()}
            gradients = {name: one for name, one in known.items() if type(one) is torch.Tensor and not one.is_sparse}
            norms = torch._foreach_norm([*gradients.values()], math.inf) if gradients else []
            largest = read_later(torch.stack(norms)) if norms else None
            inputs: list[tuple[BatchTensor, Reading | None]] = []
            for name, kept in p.losses.inputs.items():
                value = kept()
                if value is not None and not value.is_sparse and 0 < value.numel() <= _MOST_OF_INPUTS:
                    dtype = str(value.dtype).removeprefix("torch.")
                    shown: BatchTensor = {"name": name, "shape": [*value.shape], "dtype": dtype}
                    inputs.append((shown, read_later(torch.aminmax(value).max)))
            p.measured.deferred.append(Witnessed([*gradients], largest, inputs))
            p.unusual = True
        p.costs.pass_ns += time.perf_counter_ns() - began


def _spread(optimizer: Optimizer, model: nn.Module | None) -> dict[str, weakref.ref[torch.Tensor]]:
    """Small parameters of one type and device, in the order of the model."""
    order = {id(p): place for place, p in enumerate(model.parameters())} if model is not None else {}
    named = [
        (name, p) for name, p in zip(names_of(optimizer, model), parameters_of(optimizer), strict=True)
        if p.requires_grad and 0 < p.numel() <= _MOST_OF_ONE
    ]  # fmt: skip
    named.sort(key=lambda one: order.get(id(one[1]), len(order)))
    alike = [(name, p) for name, p in named if (p.dtype, p.device) == (named[0][1].dtype, named[0][1].device)]
    every = max(1, math.ceil(len(alike) / _MOST_PARAMETERS))
    return {name: weakref.ref(p) for name, p in alike[::every]}
