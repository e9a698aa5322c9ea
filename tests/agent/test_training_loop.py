"""What the agent sees of a training through perfagent.loop, which tells it nothing but the loss that it cannot see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training.loop.test_loop import Stream, batches_of, loss_of, net, run, sgd

import perfagent
from perfagent import session


@pytest.fixture
def watched(record: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """watched(model): a recorded run that is the current one."""

    def start(model: nn.Module) -> Any:
        recorded = record(model)
        monkeypatch.setattr(session, "_current", recorded.run)
        return recorded

    return start


def test_loss_is_the_mean_over_a_window_and_its_phases_are_known(watched: Any) -> None:
    data = batches_of([1, 7, 3, 3])
    model = net()
    recorded = watched(model)
    loop = perfagent.loop(model, sgd(model, lr=0.0), grad_accum=2, clip_norm=1.0)
    run(loop, DataLoader(Stream(data), batch_size=None))
    with torch.no_grad():
        means = [
            float(loss_of(model, (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])))) for a, b in (data[:2], data[2:])
        ]
    assert recorded.of("loss") == [(1, pytest.approx(means[0], rel=1e-6)), (2, pytest.approx(means[1], rel=1e-6))]
    phases = {f"phase/{name}_s" for name in ("data", "forward", "backward", "optimizer")}
    assert {"loss", "lr", "grad/norm", *phases} <= {name for _, values in recorded.rows for name in values}
