"""torch.compile: attached before, attached after. The number of graphs is part of what a loop produces."""

from __future__ import annotations

import torch
from models import Points, classifier
from script import Script, train
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader


def attached_before(script: Script, backend: str = "aot_eager") -> None:
    """The agent comes first, the compiler sees a process with hooks in it."""
    _train(script, is_late=False, backend=backend)


def attached_after(script: Script) -> None:
    """The model is compiled and has run when the agent comes."""
    _train(script, is_late=True)


def _train(script: Script, *, is_late: bool, backend: str = "aot_eager") -> None:
    model = classifier()
    if not is_late:
        script.attach(model)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=graphs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(compiled(batch[0]), batch[1])

    if is_late:
        train(script, model, [optimizer], DataLoader(Points(16), batch_size=8), loss_of)
        script.steps.clear()
        script.attach(compiled, optimizer)
    train(script, model, [optimizer], loss_of=loss_of)
    script.produced(nn.ParameterList([torch.tensor(float(graphs.frame_count))]))
