"""A run whose sender only records, with the real hooks in torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import RecordingSender


class Recorded:
    """A run under test: train with it, `finish()` it, and look at what it handed to the sender."""

    def __init__(self, folder: Path, model: Any, start_step: int | None, optimizer: Any, **settings: Any) -> None:
        from perfagent.session import Run

        self.sender = RecordingSender(folder, **settings)
        self.run = Run(
            self.sender.config,
            name=None,
            config={},
            tags=[],
            group=None,
            start_step=start_step,
            sender=self.sender,  # type: ignore[arg-type]
        )
        self.run.take_up(model, optimizer, {}, [])
        self.run.start()
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def finish(self) -> None:
        self.run.finish()
        self.rows += self.sender.drain()
        assert not self.sender.rows, "a row never became ready"

    def steps(self) -> list[tuple[int, dict[str, float]]]:
        """The rows of completed steps; ends the run."""
        self.finish()
        return [(step, values) for step, values in self.rows if "lr" in values]

    def of(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of one series; ends the run."""
        self.finish()
        return [(step, values[name]) for step, values in self.rows if name in values]


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Callable[..., Recorded]]:
    """record(model=None, ...): starts a recorded run; what the hooks could not do fails the test."""
    from perfagent.boundary import guard

    made: list[Recorded] = []

    def start(model: Any = None, *, start_step: int | None = None, optimizer: Any = None, **settings: Any) -> Recorded:
        made.append(Recorded(tmp_path, model, start_step, optimizer, **settings))
        return made[-1]

    yield start
    for recorded in made:
        recorded.run.finish()
    assert not guard.failures, f"hooks failed: {guard.failures}"


@pytest.fixture
def nothing_compiled() -> None:
    """A process in which nothing was compiled, whatever other tests did in it."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
