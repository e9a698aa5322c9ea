"""The demo's training as a job for `perfagent tune --demo` and `perfagent estimate --demo`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from perfagent_loop.search.job import TuningJob
from perfagent_tools.demo.data import Windows, read_sources
from perfagent_tools.demo.model import GPT

__all__ = ["job"]


def job() -> TuningJob:
    torch.manual_seed(0)
    model = GPT()
    if torch.cuda.is_available():
        model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Windows(read_sources(), model.context)
    return TuningJob(model=model, optimizer=optimizer, dataset=data, loss=_loss, batch_size=16)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
