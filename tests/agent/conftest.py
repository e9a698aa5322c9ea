"""A run whose sender only records, with the real hooks in torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import RecordingSender
from fake_streams import Devices, fake_devices

import perfagent


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

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [data for name, data, _ in self.sender.events if name == kind]

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

    def series(self, name: str) -> dict[int, float]:
        """The values of one series by step; ends the run."""
        return dict(self.of(name))

    def numbers(self, name: str) -> list[int]:
        """The steps that have a value of this series; ends the run."""
        return [step for step, _ in self.of(name)]

    def consumed(self, unit: str = "samples") -> dict[int, int]:
        """Samples or tokens of each step that has a rate; ends the run."""
        rates = self.series(f"{unit}_per_s")
        return {step: round(rates[step] * values["step_time_s"]) for step, values in self.steps() if step in rates}

    def phases(self) -> list[tuple[str, int]]:
        """Name and beginning of each phase that is an event."""
        return [(data["name"], data["begin_step"]) for kind, data, _ in self.sender.events if kind == "phase"]

    @property
    def progress(self) -> Any:
        """The state that hooks and sender share."""
        return self.sender.progress

    def poll(self) -> None:
        """What the sender's thread does now and then."""
        for source in list(self.sender.sources):
            source()

    def tick(self) -> None:
        """The same, after it has taken the rows that are ready."""
        self.rows += self.sender.drain()
        self.poll()


@pytest.fixture(autouse=True)
def no_run_left() -> Iterator[None]:
    yield
    perfagent.finish()


@pytest.fixture
def record(tmp_path: Path, nothing_compiled: None) -> Iterator[Callable[..., Recorded]]:
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
def everything(record: Callable[..., Recorded]) -> Callable[..., Recorded]:
    """everything(model, ...): a run that looks at gradients, weights and units in every step."""

    def start(model: Any = None, **settings: Any) -> Recorded:
        recorded = record(model, overhead_budget_pct=1e9, **settings)
        recorded.progress.links.gradient_schedule.deeper = 1
        return recorded

    return start


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    with fake_devices(monkeypatch) as made:
        yield made


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nothing was compiled and no jagged tensor was made, whatever other tests did in it; and none is
    left for the next ones."""
    if jagged := sys.modules.get("torch.nested._internal.nested_tensor"):
        monkeypatch.setattr(jagged, "_tensor_id_counter", 0)
    _forget_what_was_compiled()
    yield
    _forget_what_was_compiled()


def _forget_what_was_compiled() -> None:
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()
