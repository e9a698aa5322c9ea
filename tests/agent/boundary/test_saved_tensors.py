"""Whether a tensor that autograd keeps was packed by a hook, in each version of torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from perfagent.boundary import saved_tensors
from perfagent.boundary.saved_tensors import is_packed


def divided() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) / torch.full((2,), 3.0)


def test_what_a_hook_packs_is_told_from_what_torch_keeps(record) -> None:
    record(nn.Linear(2, 2))
    assert not is_packed(divided().grad_fn._raw_saved_other)
    with saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        assert is_packed(divided().grad_fn._raw_saved_other)


class Older:
    """A kept tensor of a torch that does not say whether a hook packed it."""


def test_where_torch_is_silent_all_tensors_count_as_packed(monkeypatch) -> None:
    monkeypatch.setattr(torch._C._autograd, "SavedTensor", Older)
    monkeypatch.setattr(saved_tensors_hooks, "__enter__", saved_tensors_hooks.__enter__)
    saved_tensors.install(lambda owner, name, watch: setattr(owner, name, watch(getattr(owner, name))))
    assert not is_packed(Older())
    with saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        assert is_packed(Older())
    assert is_packed(Older())
    assert not is_packed(None)
    saved_tensors.forget()
    assert not is_packed(Older())
