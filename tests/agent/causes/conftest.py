"""Small models that train for real, and a look at what the agent said about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from perfagent_server.rules.causes import cause_words, reason_words
from perfagent_server.rules.texts import LANGUAGES


@pytest.fixture(autouse=True)
def nothing_failed() -> Iterator[None]:
    """What fails inside is contained; a test that did not notice would prove nothing."""
    from perfagent.boundary import guard

    guard.reset()
    torch.manual_seed(7)
    yield
    assert not guard.failures, guard.failures


class Block(nn.Module):
    """broken: gives this instead of its own output's first value."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(size, size), nn.GELU()
        self.broken: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.act(self.linear(x))
        if self.broken is not None:
            out = torch.cat([out[:, :1] * self.broken, out[:, 1:]], 1)
        return x + out


class Net(nn.Module):
    def __init__(self, size: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(blocks)])
        self.head = nn.Linear(size, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Made(nn.Module):
    """A model of these parts. computes: its output, of itself and its inputs."""

    def __init__(self, computes: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.computes = computes
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.computes(self, *inputs)


def linears(*names: str, size: int = 8) -> dict[str, nn.Module]:
    """Layers of that size; a first that is called `embed` has eight inputs, a last that is called `head` four outputs."""
    sizes = {name: (8 if name == "embed" else size, 4 if name == "head" else size) for name in names}
    return {name: nn.Linear(*both) for name, both in sizes.items()}


class Training:
    """One job: `step()` trains one step and lets the agent's sender thread look, as it does every 200 ms."""

    def __init__(self, record: Callable[..., Any], model: nn.Module | None = None, lr: float = 0.01) -> None:
        self.model = model if model is not None else Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.recorded = record(self.model)
        self.sender, self.run = self.recorded.sender, self.recorded.run
        self.progress = self.sender.progress
        self.watch = self.progress.links.investigator
        self.inputs: Callable[[], torch.Tensor] = lambda: torch.randn(6, 8)
        self.losses: list[float] = []
        self.spoil: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss
        self.guard = False  # whether the loop steps on no gradients after a bad loss
        self.looks = True  # whether the sender's thread gets to anything
        self.every: int | None = None  # in every so manieth step gradients are measured, whatever that costs

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs(), torch.randint(0, 4, (6,))

    def step(self, inputs: torch.Tensor | None = None) -> None:
        x, y = self.batch()
        if inputs is not None:
            x = inputs
        if self.every is not None:
            done = self.progress.completed
            self.progress.measure_at = done if done % self.every == 0 else done + 1
        self.optimizer.zero_grad()
        loss = self.spoil(nn.functional.cross_entropy(self.model(x), y))
        loss.backward()
        if self.guard and not torch.isfinite(loss):
            self.optimizer.zero_grad()
        self.optimizer.step()
        self.losses.append(loss.item())
        if self.looks:
            self.look()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def spoilt(self, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """One step with such a loss."""
        self.spoil = spoil
        self.step()
        self.spoil = lambda loss: loss

    def look(self) -> None:
        self.recorded.rows += self.sender.drain()
        self.watch.poll()

    def command(self, kind: str, identity: str = "c1", **params: Any) -> None:
        for callback in self.sender.on_command:
            callback({"id": identity, "kind": kind, "params": params})

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [data for name, data, _ in self.sender.events if name == kind]

    def answers(self, identity: str = "c1") -> list[tuple[str, dict[str, Any]]]:
        """(state, why) of what a command was answered. The server makes a sentence of each reason."""
        said = [(one["state"], one.get("why", {})) for one in self.events("command") if one["command"] == identity]
        assert all(reason_words(why, language) != str(why) for _, why in said if why for language in LANGUAGES), said
        return said

    def finding(self) -> dict[str, Any]:
        """The only one, of whose facts the server makes sentences."""
        (found,) = self.events("finding")
        assert all(cause_words({"rank": 0, **found["evidence"]}, language) for language in LANGUAGES), found
        return found


@pytest.fixture
def train(record: Callable[..., Any]) -> Callable[..., Training]:
    """train(model=None): a job under the agent, with a sender that only records."""
    return lambda *args, **more: Training(record, *args, **more)
