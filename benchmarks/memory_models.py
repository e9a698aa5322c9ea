"""Eight small trainings of different kinds, and the peak that torch.profiler sees in each.

As a script: a line of JSON for each name that it is given; all of a training happens while the profiler looks.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from perfagent_tools.demo.model import GPT

Parts = tuple[nn.Module, tuple[Tensor, Tensor], torch.optim.Optimizer]


def mlp() -> Parts:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    return model, (torch.randn(512, 256), torch.randint(0, 10, (512,))), torch.optim.AdamW(model.parameters())


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.inside(x))


def convolutions() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 5, stride=2), Residual(32), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), Residual(64), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))), optimizer


def gpt() -> Parts:
    model = GPT(width=96, layers=3, context=64)
    return (
        model,
        (torch.randint(0, 256, (8, 64)), torch.randint(0, 256, (8, 64))),
        torch.optim.AdamW(model.parameters()),
    )


def encoder() -> Parts:
    layer = nn.TransformerEncoderLayer(96, 4, 256, batch_first=True, dropout=0.1)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, (torch.randn(8, 48, 96), torch.randn(8, 48, 96)), torch.optim.Adam(model.parameters(), foreach=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(500, 64)
        self.lstm = nn.LSTM(64, 96, num_layers=2, batch_first=True)
        self.head = nn.Linear(96, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(tokens))[0])  # type: ignore[no-any-return]


def lstm() -> Parts:
    model = Recurrent()
    return (
        model,
        (torch.randint(0, 500, (16, 40)), torch.randint(0, 500, (16, 40))),
        torch.optim.AdamW(model.parameters()),
    )


def frozen() -> Parts:
    model, batch, _ = mlp()
    model[2].requires_grad_(False)  # type: ignore[index]
    return model, batch, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


class LowRank(nn.Module):
    """LoRA by hand, as the library does it: the layer frozen, two small factors beside it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a, self.b = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x))  # type: ignore[no-any-return]


def adapters() -> Parts:
    """What estimate_memory(gpt, lora=8) stands for."""
    model, batch, _ = gpt()
    model.requires_grad_(False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][:-1]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LowRank(model.get_submodule(name), 8))  # type: ignore[arg-type]
    return model, batch, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def autoencoder() -> Parts:
    """Transposed convolutions, and a loss that is reduced from as many numbers as the images have."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1),
    )  # fmt: skip
    images = torch.randn(16, 3, 64, 64)
    return model, (images, images.clone()), torch.optim.AdamW(model.parameters())


MODELS: dict[str, Callable[[], Parts]] = {
    "mlp": mlp, "convolutions": convolutions, "gpt": gpt, "encoder": encoder, "lstm": lstm, "frozen": frozen,
    "adapters": adapters, "autoencoder": autoencoder,
}  # fmt: skip


def loss_of(output: Tensor, batch: Any) -> Tensor:
    target = batch[1]
    if target.is_floating_point():
        return functional.mse_loss(output, target)
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def measured_peak(name: str, *, half: bool = False, prepare: Callable[[nn.Module], object] = lambda model: None) -> int:
    """Bytes at the largest moment of three steps, weights included: the running sum of what the profiler saw
    allocated."""
    gc.collect()
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model, batch, optimizer = MODELS[name]()
        prepare(model)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = loss_of(model(batch[0]), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            optimizer.step()
    now = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def _checkpointed(model: nn.Module) -> object:
    from perfagent_loop.compute.activation import checkpoint_activations

    return checkpoint_activations(model, "all")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for given in sys.argv[1:]:
        name, _, how = given.partition("/")
        prepare = _checkpointed if how == "checkpointed" else (lambda model: None)
        print(json.dumps({"name": given, "peak_bytes": measured_peak(name, half=how == "bf16", prepare=prepare)}))
