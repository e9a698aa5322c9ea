"""torch.compile: attached before, attached after. The number of graphs is part of what a loop produces."""

from __future__ import annotations

import torch
from models import Points, classifier
from script import Script, stepped
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader


def attached_before(script: Script, backend: str = "aot_eager") -> None:
    """The agent comes first, the compiler sees a process with hooks in it."""
    model = classifier()
    script.attach(model)
    _train(script, model, first=0, backend=backend)


def attached_after(script: Script) -> None:
    """The model is compiled and has run when the agent comes."""
    _train(script, classifier(), first=2)


def _train(script: Script, model: nn.Sequential, first: int, backend: str = "aot_eager") -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=graphs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(DataLoader(Points(8 * (6 + first)), batch_size=8), start=1):
        if first and number == first + 1:
            script.attach(compiled, optimizer)
        loss = nn.functional.cross_entropy(compiled(x), y)
        stepped(script, model, [optimizer], loss)
    del script.steps[:first]
    script.produced(model)
    script.produced(nn.ParameterList([torch.tensor(float(graphs.frame_count))]))
