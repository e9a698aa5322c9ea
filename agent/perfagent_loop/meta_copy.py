"""Copies a model and its optimizer into tensors that have a size and no contents.

The user's own are never written to: what is simulated are copies. Where fake tensors do not suffice (the model reads a
value back in the middle of its forward pass) the same copy is made of real ones."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_module
from perfagent_loop.data.transfer import rebuilt
from perfagent_loop.kinds import Batch

__all__ = ["Twin", "plain_module"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Twin:
    """Copies modules, optimizers and batches. device: where they pretend to be. real: with contents after all."""

    def __init__(self, device: torch.device, *, real: bool = False) -> None:
        self.device = device
        self.mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        self._memo: dict[int, Any] = {}
        self._originals: list[Any] = []

    def module(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """A copy in training mode. dtype: of its floating-point parameters and buffers; as they are when None."""
        for parameter in model.parameters():
            made = nn.Parameter(self._tensor(parameter, dtype), requires_grad=parameter.requires_grad)
            self._remember(parameter, made)
        for buffer in model.buffers():
            self._remember(buffer, self._tensor(buffer, dtype))
        with nullcontext() if self.mode is None else FakeCopyMode(self.mode):
            twin: nn.Module = copy.deepcopy(model, self._memo)
        twin.train()
        return twin

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """A copy over the parameters of the copied module, with the state that it has already."""
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in self._memo for parameter in (*optimizer.state, *stepped)):
            raise ConfigError("the optimizer has parameters that are not the model's; make it of model.parameters()")
        for value in (value for state in optimizer.state.values() for value in state.values()):
            if isinstance(value, Tensor):
                self._remember(value, self._scalar(value) if value.ndim == 0 else self._tensor(value, None))
        with nullcontext() if self.mode is None else FakeCopyMode(self.mode):
            twin: torch.optim.Optimizer = copy.deepcopy(optimizer, self._memo)
        return twin

    def batch(self, batch: Batch, dtype: torch.dtype | None = None) -> Any:
        """The same containers with copied tensors."""
        return mapped(batch, lambda tensor: self._tensor(tensor, dtype))

    def instead(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """From here on an optimizer is copied over these instead of the copied parameters that they stand for."""
        for original in list(self._originals):
            made = self._memo[id(original)]
            if isinstance(made, nn.Parameter) and made in masters:
                self._memo[id(original)] = masters[made]

    def forget(self) -> None:
        """Lets go of the copies: what nothing else holds is freed, and optimizers can no longer be copied."""
        self._memo.clear()
        self._originals.clear()

    def _remember(self, original: Any, made: Any) -> None:
        self._memo[id(original)] = made
        self._originals.append(original)  # an id is good for as long as its object lives

    def _scalar(self, tensor: Tensor) -> Tensor:
        """A number that an optimizer reads back (its count of steps): a copy that knows its value."""
        with self.mode or nullcontext():
            return torch.tensor(tensor.tolist() if self.mode is None else 1.0, dtype=tensor.dtype)

    def _tensor(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        if not tensor.is_floating_point():
            dtype = None
        with self.mode or torch.no_grad():
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=self.device)
            return made if self.mode is not None else made.copy_(tensor)


def plain_module(given: object) -> nn.Module:
    """The module inside a compiled or DistributedDataParallel wrapper. Raises ConfigError."""
    inner: object = check_module(given)
    while isinstance(inner, nn.Module):
        model = inner
        wraps = type(model).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")
        inner = getattr(model, "_orig_mod", getattr(model, "module", None) if wraps else None)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} has no shape yet; run the model on one batch before it is estimated")
        if type(tensor) not in _PLAIN or hasattr(tensor, "ds_id"):
            raise ConfigError(f"{name} is a {type(tensor).__name__}: pass the model before it is sharded or quantized")
    return model


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same containers, each tensor changed."""
    return change(value) if isinstance(value, Tensor) else rebuilt(value, lambda part: mapped(part, change))
