"""What a loss is made of, read from its graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from perfagent.measure.loss_function import loss_function
from perfagent.step.state import state

if not hasattr(torch.ones(1, requires_grad=True).sum().grad_fn, "_input_metadata"):
    pytest.skip("torch 2.4 does not tell the shapes of a graph", allow_module_level=True)

INPUTS, LABELS, TARGETS = torch.randn(8, 5), torch.randint(0, 10, (8,)), torch.randn(8)
HEAD, ONE = nn.Linear(5, 10), nn.Linear(5, 1)
CROSS_ENTROPY = {"kind": "cross_entropy", "classes": 10, "mean": True, "alone": True}
SQUARE = {"broadcast": [[8, 1], [8, 8]]}


@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (lambda: functional.cross_entropy(HEAD(INPUTS), LABELS), CROSS_ENTROPY),
        (
            lambda: functional.cross_entropy(HEAD(INPUTS), LABELS, label_smoothing=0.1) / 4,
            CROSS_ENTROPY | {"alone": False},
        ),
        (lambda: functional.cross_entropy(HEAD(INPUTS), LABELS) / 4, CROSS_ENTROPY),
        (lambda: functional.cross_entropy(HEAD(INPUTS), LABELS, reduction="sum"), CROSS_ENTROPY | {"mean": False}),
        (lambda: functional.nll_loss(functional.log_softmax(HEAD(INPUTS), -1), LABELS), CROSS_ENTROPY),
        (
            lambda: functional.cross_entropy(HEAD(INPUTS).view(2, 4, 10).permute(0, 2, 1), LABELS.view(2, 4)),
            CROSS_ENTROPY,
        ),
        (lambda: functional.cross_entropy(HEAD(INPUTS).softmax(-1), LABELS), CROSS_ENTROPY | {"fed_by": "softmax"}),
        (
            lambda: functional.binary_cross_entropy_with_logits(ONE(INPUTS).sigmoid().squeeze(1), TARGETS.sigmoid()),
            {"kind": "binary_cross_entropy_with_logits", "fed_by": "sigmoid"},
        ),
        (lambda: functional.mse_loss(ONE(INPUTS).squeeze(1), TARGETS), {"kind": "mse"}),
        (lambda: functional.mse_loss(ONE(INPUTS), TARGETS), {"kind": "mse", **SQUARE}),
        (lambda: ((ONE(INPUTS) - TARGETS) ** 2).mean(), SQUARE),
        (lambda: ((ONE(INPUTS).squeeze(1) - TARGETS[:, None]) ** 2).mean(), {"broadcast": [[8], [8, 8]]}),
        (lambda: functional.l1_loss(ONE(INPUTS), TARGETS), SQUARE),
        (lambda: functional.smooth_l1_loss(ONE(INPUTS), TARGETS), {"kind": "smooth_l1", **SQUARE}),
        (lambda: ((ONE(INPUTS) - ONE(INPUTS).T) ** 2).mean(), {}),  # all pairs, and meant
        (lambda: (0.2 + ONE(INPUTS) - TARGETS).clamp(min=0).sum(), {}),  # of all negatives, as in metric learning
        (lambda: functional.cross_entropy(functional.log_softmax(HEAD(INPUTS), -1), LABELS), CROSS_ENTROPY),
        (lambda: HEAD(INPUTS).square().mean(), {}),
        (lambda: torch.ones(1), {}),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_loss_is_known_by_its_graph(loss, known):
    assert loss_function(loss()) == known


@pytest.mark.parametrize(
    "several", [dict.values, iter, tuple, list], ids=["a view", "an iterator", "a tuple", "a list"]
)
def test_several_losses_are_taken_as_torch_takes_them(record, several):
    record(HEAD)
    losses = {"a": functional.cross_entropy(HEAD(INPUTS), LABELS), "b": HEAD(INPUTS).square().mean()}
    torch.autograd.backward(several(losses) if several is dict.values else several([*losses.values()]))
    assert state.current is not None
    assert state.current.losses.loss_made == (CROSS_ENTROPY if several in (tuple, list) else {})
    assert HEAD.weight.grad is not None and HEAD.weight.grad.any()


def test_the_loss_of_the_first_step_is_kept(record):
    record(HEAD)
    optimizer = torch.optim.SGD(HEAD.parameters(), 0.1)
    for loss in (functional.cross_entropy(HEAD(INPUTS), LABELS), HEAD(INPUTS).square().mean()):
        loss.backward()
        optimizer.step()
        assert state.current is not None and state.current.losses.loss_made == CROSS_ENTROPY
